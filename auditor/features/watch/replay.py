"""Replays a capsule: the step as recorded, in FP32 and in every recipe; what fails first, and what repairs it."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ...errors import AuditorError, let_through
from ...numerics.formats import label
from ...records import Progress
from ...training.step import LOSS
from ..rehearsal.forked import call_forked
from ..rehearsal.loops import as_step
from ..rehearsal.rehearse import problems_of, recipe_as_written
from ..rehearsal.result import AS_WRITTEN, FP32, Recipe, RecipeProblem, RecipeRun, StepFinding
from . import capsule as files
from .capsule import About, Capsule
from .facts import broken_batch, broken_weights, facts_of
from .objects import objects_of, optimizers_of, set_optimizers, with_all_ranks
from .plan import plan_of
from .reads import places_read
from .recorder import Recorder
from .result import Culprit, Outcome, Replay
from .session import CAUSE, ReplaySession, zero_share
from .signals import LOST
from .steps import CapsuleStep
from .watched import modules_beside
from .weights import load_beside, load_weights

FIRST_SCALE = 65536.0
"""GradScaler's default."""
CLOSE = 0.02
"""Largest relative difference of the replayed loss from the recorded one that counts as reproduced."""
SHOWN_BY_ONE = ("updates-lost", "second-moment-zero", "sums-rounded")
"""Kinds of problems of a rehearsal that one step shows, and that a replay does not say in its own words."""
SPIKES = ("loss-spike", "gradient-spike")
_LINE = re.compile(r"\(([^()]+:\d+)\)")

Audit = Callable[..., Any]
"""`auditor.audit`, which this package does not import."""


def replay(
    folder: Path,
    target: Any,
    text: str,
    recorders: Sequence[Recorder] = (),
    audit: Audit | None = None,
    progress: Progress | None = None,
) -> Replay:
    """Replay the capsule in `folder` with the user's step, in forked processes; the user's model gets its weights.

    target: the step, LightningModule, Trainer or model, whose file has been imported; text: its name. recorders: those
    that the file created. audit: audits the training step, for a plan. Raises: LoadError(slug="bad-capsule" | "bad-step").
    """
    capsule = with_all_ranks(folder, files.read(folder))
    about = capsule.about
    tell = progress or (lambda *_: None)
    loop, _ = as_step(target, 1)  # a LightningModule's or a Trainer's own step; else the target itself
    model, optimizers, scalers = objects_of(capsule, recorders, loop)
    load_weights(capsule, model)
    step = CapsuleStep(capsule, loop, model)
    if not optimizers:
        optimizers = optimizers_of(model)
    load_beside(capsule, modules_beside(places_read(loop), model), optimizers)
    set_optimizers(capsule, optimizers)
    step.optimizers = optimizers
    finished = {id(optimizers[i]) for i in about.updated if i < len(optimizers)}
    session = ReplaySession(step, capsule, scalers, finished)
    plan: Any = None

    def run(recipe: Recipe) -> RecipeRun:
        tell("replay", recipe.title, 0, 0)
        try:
            done: RecipeRun = call_forked(partial(session.run, recipe, 1))
            session.explain(done)
            return done
        except AuditorError as error:
            let_through(error)
            return RecipeRun(recipe, failure=str(error))

    recipes = [FP32, *recipe_as_written(session), *_standard(about)]
    runs = {recipe.name: run(recipe) for recipe in recipes}
    recorded = AS_WRITTEN if AS_WRITTEN in runs else "fp32"
    outcomes = [_outcome(name, runs) for name in runs]
    underflow = _underflow(session, runs, recorded) if about.kind == "gradients-flushed" else None
    fails_in_fp32 = _fails(outcomes[0])
    culprit = underflow or _culprit(capsule, outcomes, recorded, runs)
    repairs = list(_islands(runs)) if not fails_in_fp32 else []
    if audit is not None and session.root is model and not fails_in_fp32 and any(_fails(one) for one in outcomes):
        tell("replay", "audit of the training step", 0, 0)
        plan = plan_of(step, capsule, model, audit, _format_of(runs, recorded))
        repairs += [plan] if plan is not None else []
    for recipe in repairs:
        runs[recipe.name] = run(recipe)
        outcomes.append(_outcome(recipe.name, runs))
    findings = tuple(runs[recorded].findings)
    is_reproduced = _is_reproduced(capsule, outcomes, recorded, runs)
    repair = "" if fails_in_fp32 else _repair(outcomes, recorded, runs)
    return Replay(
        capsule=str(folder),
        target=text,
        about=about,
        outcomes=tuple(outcomes),
        recorded=recorded,
        is_reproduced=is_reproduced,
        verdict=_verdict(folder, capsule, culprit, findings, is_reproduced, fails_in_fp32),
        culprit=culprit,
        fails_in_fp32=fails_in_fp32,
        findings=findings,
        facts=tuple(facts_of(capsule, loop)),
        repair=repair,
        advice=_advice(capsule, culprit, findings, repair, outcomes, fails_in_fp32),
        plan=_scopes(runs[repair].recipe) if repair else {},
    )


# The recipes.


def _standard(about: About) -> Iterator[Recipe]:
    yield Recipe("bf16_autocast", "BF16 under autocast", "bf16")
    scale = about.scale or FIRST_SCALE
    yield Recipe("fp16_autocast", f"FP16 under autocast, loss scale {scale:g}", "fp16", scale=scale)
    yield Recipe("bf16", "pure BF16 (weights, gradients, optimizer)", "bf16", stored=True)


def _islands(runs: Mapping[str, RecipeRun]) -> Iterator[Recipe]:
    """For each recipe under autocast that fails: with the module to blame in FP32."""
    for name in ("fp16_autocast", "bf16_autocast"):
        run = runs[name]
        module = next((one.module for one in (*run.skipped, *run.bad_losses) if one.module), None)
        if run.failure is None and module:
            island = "the loss" if module == LOSS else module
            scopes = {"": {"precision": run.recipe.format}, module: {"precision": "fp32"}}
            title = f"{run.recipe.title}, {island} in FP32"
            yield replace(run.recipe, name=f"{name}_island", title=title, scopes=scopes, repairs=name)


def _format_of(runs: Mapping[str, RecipeRun], recorded: str) -> str:
    """The low-precision format of the training, or of the first recipe that fails."""
    format = runs[recorded].recipe.format
    if format != "fp32":
        return format
    failing = [run.recipe.format for run in runs.values() if run.skipped or run.bad_losses]
    return next((one for one in failing if one != "fp32"), "fp16")


def _outcome(name: str, runs: Mapping[str, RecipeRun]) -> Outcome:
    run = runs[name]
    bad = [*run.skipped, *run.bad_losses]
    loss = run.losses[0] if run.losses else math.nan
    located = next((one for one in bad if one.where), None)
    culprit = culprit_of(located.where, located.module) if located is not None else None
    problem = _problem(run, loss)
    zeros = zero_share(run)
    exact = zero_share(runs["fp32"])
    new_zeros = [zeros[key] - exact.get(key, 0.0) for key in zeros]
    if not problem and name != "fp32":
        known = [one for one in _problems(name, runs) if one.kind in SHOWN_BY_ONE]
        problem = known[0].text if known else ""
    return Outcome(
        name=name,
        title=run.recipe.title if name != "fp32" else "FP32",
        loss=loss,
        is_finite=not bad and run.failure is None,
        problem=problem,
        culprit=culprit,
        scale=run.scale,
        lost=run.share("updates_lost"),
        zero=max(new_zeros, default=None),
        error=None if name == "fp32" else run.share("error"),
        repairs=run.recipe.repairs,
    )


def _problems(name: str, runs: Mapping[str, RecipeRun]) -> list[RecipeProblem]:
    try:
        return list(problems_of(name, runs))
    except (ValueError, ZeroDivisionError, IndexError):  # FP32 has no losses
        return []


def _problem(run: RecipeRun, loss: float) -> str:
    if run.failure is not None:
        return f"raises: {run.failure}"
    if run.bad_losses or (run.skipped and not math.isfinite(loss)):
        return f"the loss is {loss}"
    if run.skipped:
        return "gradients or weights are Inf or NaN"
    return ""


def culprit_of(where: str, module: str | None) -> Culprit:
    """The culprit in a run's `where`: the operation with its line, and the cause."""
    words, _, cause = where.partition(CAUSE)
    lines = _LINE.findall(words)
    return Culprit(words, lines[-1] if lines else "", module, cause)


def _fails(outcome: Outcome) -> bool:
    return not outcome.is_finite


# What is said.


def _culprit(capsule: Capsule, outcomes: list[Outcome], recorded: str, runs: Mapping[str, RecipeRun]) -> Culprit | None:
    """The operation to blame: under the precision of the training, else in FP32, else in the first recipe that fails."""
    about = capsule.about
    weights = next(broken_weights(capsule), None)
    if weights is not None:
        kind = " and ".join(about.optimizers) or "optimizer"
        words = f"the update of {kind} before this step, which left {weights}"
        return Culprit(
            f"{words} ({about.update})", about.update, weights.partition(" ")[0], "the weights are not finite"
        )
    if about.kind == "updates-lost":
        return _lost_update(about, runs[recorded])
    by_name = {one.name: one for one in outcomes}
    others = () if about.kind in (*SPIKES, "clipped-while-scaled", "asked") else by_name
    for name in dict.fromkeys((recorded, "fp32", *others)):
        found = by_name[name].culprit
        if found is not None and not found.line and found.words.startswith("the update of"):
            return replace(found, words=f"{found.words} ({about.update})", line=about.update)
        if found is not None:
            return found
    return None


def _lost_update(about: About, run: RecipeRun) -> Culprit | None:
    shares = {name: run.share("updates_lost", name) or 0.0 for name in run.parameters}
    if not shares:
        return None
    worst = max(shares, key=lambda name: shares[name])
    module = worst.rpartition(".")[0]
    stored = label(run.recipe.format) if run.recipe.stored else "FP32"
    cause = f"{shares[worst]:.0%} of its updates are below half the spacing of {stored} numbers"
    kind = about.optimizers[0] if about.optimizers else "optimizer"
    return Culprit(f"the update of {worst} by {kind} ({about.update})", about.update, module, cause)


def _underflow(session: ReplaySession, runs: Mapping[str, RecipeRun], recorded: str) -> Culprit | None:
    """The operation whose gradients become zero under the precision of the training."""
    recipe = runs[recorded].recipe

    def search(tell: Any) -> tuple[str, str | None]:
        session._prepare(recipe)
        return session.search_underflow(tell)

    try:
        where, module = call_forked(search)
    except AuditorError as error:
        let_through(error)
        return None
    return culprit_of(where, module) if where else None


def _is_reproduced(capsule: Capsule, outcomes: list[Outcome], recorded: str, runs: Mapping[str, RecipeRun]) -> bool:
    """Whether the step under the precision of the training shows what the trigger saw."""
    about = capsule.about
    outcome = next(one for one in outcomes if one.name == recorded)
    run = runs[recorded]
    match about.kind:
        case "loss-not-finite":
            return bool(run.losses) and not math.isfinite(outcome.loss)
        case "updates-lost":
            shares = [run.share("updates_lost", name) or 0.0 for name in run.parameters]
            return max(shares, default=0.0) > LOST
        case "gradients-flushed":
            return (outcome.zero or 0.0) > LOST or max(zero_share(run).values(), default=0.0) > LOST
        case "clipped-while-scaled":
            return bool(run.findings)
        case "raised":
            return run.failure is not None or not outcome.is_finite or about.error in outcome.problem
        case "loss-spike" | "gradient-spike" | "asked" | "rate-not-finite":
            known = about.loss
            return known is None or abs(outcome.loss - known) <= CLOSE * abs(known)
    return not outcome.is_finite


def _verdict(
    folder: Path,
    capsule: Capsule,
    culprit: Culprit | None,
    findings: Sequence[StepFinding],
    is_reproduced: bool,
    fails_in_fp32: bool,
) -> str:
    about = capsule.about
    seen = f"Step {about.step}: {about.text}."
    if not is_reproduced and about.world > 1:
        others = sorted(
            one.name for one in folder.resolve().parent.glob(f"step-{about.step:06d}-loss-*") if one != folder
        )
        hint = f": replay {', '.join(others)}" if others else ": replay the capsules of the other ranks"
        return f"{seen} The step of rank {about.rank} is finite, so that the failure came from another rank{hint}."
    state = "Reproduced" if is_reproduced else "Not reproduced: the step runs without this problem here"
    if culprit is not None:
        also = ", in FP32 too" if fails_in_fp32 else ""
        return f"{seen} {state}{also}. It begins at {culprit.sentence}."
    if findings:
        return f"{seen} {state}. {findings[0].text} ({findings[0].line})."
    if about.kind in SPIKES and is_reproduced:
        return f"{seen} {state}, in FP32 too: the batch or the weights are the reason, not the precision."
    return f"{seen} {state}."


def _advice(
    capsule: Capsule,
    culprit: Culprit | None,
    findings: Sequence[StepFinding],
    repair: str,
    outcomes: list[Outcome],
    fails_in_fp32: bool,
) -> str:
    bad_entry = next(broken_batch(capsule), None)
    if bad_entry is not None:
        return f"Repair the data: {bad_entry}. No precision changes that."
    if next(broken_weights(capsule), None) is not None:
        return (
            "The weights were not finite before this step: replay an earlier capsule, or use a smaller learning rate."
        )
    if fails_in_fp32:
        place = f" {culprit.line}" if culprit is not None and culprit.line else ""
        return f"FP32 fails too, so that no precision plan repairs this step: change the code at{place or ' the operation'}."
    if findings:
        return f"Change {findings[0].line}: {findings[0].text}."
    if repair:
        title = next(one.title for one in outcomes if one.name == repair)
        return f"Train in {title}: this step then has no problem."
    return "No recipe has a problem with this step."


def _repair(outcomes: list[Outcome], recorded: str, runs: Mapping[str, RecipeRun]) -> str:
    """The name of the recipe that repairs the step: the plan, then FP32 islands, BF16, FP16, and FP32."""
    own = next(one for one in outcomes if one.name == recorded)
    if own.is_finite and not own.problem and all(one.is_finite for one in outcomes):
        return ""
    good = {one.name for one in outcomes if one.is_finite and not one.problem}
    format = runs[recorded].recipe.format
    order = ["plan", f"{format}_autocast_island", "fp16_autocast_island", "bf16_autocast", "fp16_autocast", "fp32"]
    return next((name for name in order if name in good and name != recorded), "")


def _scopes(recipe: Recipe) -> dict[str, str]:
    return {path: str(scope.get("precision", "")) for path, scope in recipe.scopes.items()}
