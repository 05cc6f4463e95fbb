"""Runs every recipe from the same initial state, each in a process forked from the caller's; detects problems, selects
remedies, and recommends a recipe."""

from __future__ import annotations

import math
import os
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from ...artefact.base import plan_table
from ...errors import AuditorError, let_through
from ...loading.target import call, guard_progress
from ...numerics.formats import dtype_of, label
from ...records import Plan, Progress
from ...records.audit import Audit
from ...training.limits import HEADROOM, tolerated_error
from ...training.step import LOSS
from .batches import Batches, number_batches
from .forked import bad_step, call_forked
from .loops import LightningStep, as_step
from .losing import off_losses
from .result import (
    AS_WRITTEN,
    FP32,
    FURTHER,
    RANKS,
    REMEDIES,
    ROUNDINGS,
    NonFiniteStep,
    Recipe,
    RecipeProblem,
    RecipeRun,
    Rehearsal,
    further_recipes,
)
from .session import Session
from .trials import OF_SCALE

FIRST_SCALE = 65536.0  # GradScaler's default
LOST, ALL = 0.2, 0.9
"""Share of affected entries, beyond FP32's, from which there is a problem: in all parameters together, and in one."""
ALONE = 0.5
"""Relative error of one parameter's gradient that is a problem, even if the error of all parameters' gradients is small."""
SKIPS = 0.02
"""Allowed share of skipped steps in the second half of a run: GradScaler sometimes tries a larger scale."""
DELAY = 0.25
"""Share of skipped steps up to which these only delay a training, as one does: GradScaler's first scale is often too
large."""
BEHIND, LEAST = 0.05, 1e-3
"""A recipe's loss may exceed FP32's by these shares of FP32's loss reduction and of its loss, or by the losses'
scatter."""
ROUNDED, PASSES = 0.01, 8
"""Smallest relative error of accumulated gradients worth reporting, if FP32 sums halve it; and the number of
backward passes per step that is enough to try FP32 sums."""
RAISE = 256
"""Factor on the initial loss scale of a variant; GradScaler halves the scale until gradients are finite."""
HARM = {
    "updates_lost": "of the weight updates are lost to rounding, since each is below half the spacing of {} numbers",
    "decay_lost": "of the weights stay the same under weight decay, since its change is below half the spacing of {} numbers",
    "second_moment_stuck": "of Adam's second moments that should change stay constant",
    "second_moment_zero": "of Adam's second moments with a non-zero gradient are zero",
}
"""{share in ParameterSeries, which names the kind of problem: sentence about it}."""


def rehearse(
    step: Any,
    batches: Batches = None,
    steps: int = 200,
    *,
    plan: Audit | Plan | None = None,
    seed: int = 0,
    remedies: bool = True,
    recipes: Sequence[str] = (),
    ranks: int = RANKS,
    progress: Progress | None = None,
    target: str = "",
) -> Rehearsal:
    """Run a training step `steps` times in each recipe and in FP32, emulating a GPU on a CPU, in forked processes.

    step: called as `step(batch)`, or `step(*batch)` if it takes several arguments, or `step()`; a dict as
    `step(**batch)` if the step takes several arguments or `**`. The step runs forward, `backward()` and the optimizers'
    `step()`, in FP32 or with its own autocast regions and GradScaler; recipes set the dtype of such regions. Model and
    optimizers must already exist. Or a LightningModule, or the pair of one and its Trainer or a dict of the Trainer's
    arguments; or a Trainer of transformers. batches: an iterable, or a function
    that returns one for each pass; repeated if too short; or one tensor or dict, which is one batch. At the end of an
    iterator, the rehearsal ends. By default those of a LightningModule or Trainer. plan: an audit, or one of its
    plans, to rehearse too. remedies: whether recipes with a problem are repaired and run again. recipes: further ones to run,
    "stochastic_rounding", "kahan_sums", "bf16_state" (Adam's moments), "ranks" (BF16 gradients of `ranks` simulated
    ranks, summed in FP32 and in BF16), or "all". progress: called as progress(stage, detail, done, total). Raises: LoadError(slug="bad-step") for a step that cannot be rehearsed, or
    fails in FP32; CallbackError(slug="bad-callback") if `progress` raises.
    """
    name = target or getattr(step, "__qualname__", type(step).__name__)
    step, batches = _prepared(step, batches, steps, name)
    if not callable(step) or isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise bad_step("rehearse needs a function that runs one step, and a number of steps from 1 on")
    if unknown := [name for name in recipes if name not in (*FURTHER, "all")]:
        raise bad_step(f"no recipe is called {unknown[0]!r}: give {', '.join(FURTHER)} or all")
    if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 2:
        raise bad_step("ranks must be a whole number from 2 on")
    if not hasattr(os, "fork"):
        raise bad_step("a rehearsal forks this process, which this system does not support: use Linux or macOS")
    tell = guard_progress(progress or (lambda *_: None))
    session = Session(step, partial(number_batches, batches, step), seed)

    def run(recipe: Recipe) -> RecipeRun:
        losses: list[float] = []

        def hear(said: str) -> None:
            losses.append(float(said.split()[-1]))
            tell("rehearse", recipe.title, steps * planned.index(recipe) + len(losses), steps * (len(planned) + 1))

        try:
            done: RecipeRun = call_forked(partial(session.run, recipe, steps), hear)
        except AuditorError as error:
            let_through(error)
            if recipe == FP32:
                raise bad_step(f"the step fails in FP32: {error}") from error
            return RecipeRun(recipe, losses, failure=str(error))
        session.explain(done)
        if recipe == FP32 and done.skipped:
            raise _failure_in_fp32(done.skipped[0])
        return done

    planned = [FP32, *_recipes(session, plan), *further_recipes(recipes, ranks)]
    runs = {recipe.name: run(recipe) for recipe in planned}
    planned += remedies_for(runs) if remedies else ()
    runs |= {recipe.name: run(recipe) for recipe in planned if recipe.name not in runs}
    if AS_WRITTEN in runs:
        runs = {AS_WRITTEN: runs[AS_WRITTEN], **runs}
    found = [problem for name in runs if name != "fp32" for problem in problems_of(name, runs)]
    problems = (*_bad_losses_of_fp32(runs["fp32"]), *found)
    return Rehearsal(name, len(runs["fp32"].losses), runs["fp32"].batches, runs, problems, *recommend(runs, problems))


def _failure_in_fp32(first: NonFiniteStep) -> AuditorError:
    place = f", first at {first.where}" if first.where else ""
    said = f"gradients or weights turn Inf or NaN in step {first.step} (batch {first.batch}){place}"
    return bad_step(f"the step fails in FP32: {said}: fix the step first")


def _bad_losses_of_fp32(run: RecipeRun) -> Iterator[RecipeProblem]:
    """Losses that are Inf or NaN although the step trains in FP32: no loss of another recipe can then be compared."""
    if run.bad_losses:
        yield RecipeProblem("fp32", "loss-not-finite", _said_of_bad_losses(run, run.bad_losses))


def _said_of_bad_losses(run: RecipeRun, bad: Sequence[NonFiniteStep]) -> str:
    first = next((each for each in bad if each.where), bad[0])
    said = f"the loss is Inf or NaN in {len(bad)} of {len(run.losses)} steps, first in step {bad[0].step} (batch {bad[0].batch}), although its gradients are finite"
    return f"{said}; Inf or NaN first appears at {first.where}" if first.where else said


def rehearse_as_written(step: Any, batches: Batches, steps: int, seed: int, name: str) -> dict[str, RecipeRun]:
    """{name of a recipe: its run} of FP32 and of the step as its author wrote it; the first alone if that is FP32.

    Raises: LoadError(slug="bad-step").
    """
    step, batches = _prepared(step, batches, steps, name)
    session = Session(step, partial(number_batches, batches, step), seed)
    runs = dict[str, RecipeRun]()
    for recipe in (FP32, *recipe_as_written(session)):
        run: RecipeRun = call_forked(partial(session.run, recipe, steps))
        session.explain(run)
        if recipe == FP32 and run.skipped:
            raise _failure_in_fp32(run.skipped[0])
        runs[recipe.name] = run
    return runs


def _prepared(step: Any, batches: Batches, steps: int, name: str) -> tuple[Any, Batches]:
    """The step as a function, and its batches: by default those of a LightningModule or a Trainer."""
    step, own = call(as_step, f"preparing {name}", "bad-step", step, steps)
    if batches is None:
        return step, own
    if isinstance(step, LightningStep) and step.count > 1:
        return step, step.grouped(batches)
    return step, batches


def _recipes(session: Session, plan: Audit | Plan | None) -> Iterator[Recipe]:
    """The step as written, unless it is FP32; the standard recipes; and the recipe of a plan."""
    yield from recipe_as_written(session)
    yield Recipe("bf16_autocast", "BF16 under autocast", "bf16")
    yield Recipe("fp16_autocast", "FP16 under autocast, GradScaler", "fp16", scale=FIRST_SCALE)
    yield Recipe("bf16", "pure BF16 (weights, gradients, optimizer)", "bf16", stored=True)
    if isinstance(plan, Audit):
        trained = (plan.plans.get(name or "") for name in (plan.recommended, "autocast_bf16", "autocast_fp16"))
        plan = next((one for one in trained if one is not None and one.strategy == "autocast"), None)
    if plan is not None:
        if plan.strategy != "autocast":
            raise bad_step(f"the plan {plan.name!r} has strategy {plan.strategy}: give an autocast plan")
        scale = FIRST_SCALE if plan.format == "fp16" else None
        scopes = {**plan_table(plan)["scopes"], LOSS: {"precision": "fp32"}}
        yield Recipe("plan", f"the plan {plan.name}", plan.format, scale=scale, scopes=scopes)


def recipe_as_written(session: Session) -> Iterator[Recipe]:
    """The recipe of the user's own weights, autocast regions and GradScalers; none for a step in FP32 without these."""
    weights = {p.dtype for p in session.trained} | session.copied_dtypes
    stored = next((fmt for fmt in ("fp16", "bf16") if dtype_of(fmt) in weights), None)
    region = next((fmt for fmt in ("fp16", "bf16") if dtype_of(fmt) in session.low_regions), None)
    parts = [f"weights in {label(stored)}"] if stored else []
    parts += [f"{label(region)} under autocast"] if region else []
    parts += ["GradScaler"] if session.has_scaler else []
    if parts:
        format_ = stored or region or "fp32"
        yield Recipe(AS_WRITTEN, f"as written: {', '.join(parts)}", format_, stored=stored is not None)


def problems_of(name: str, runs: Mapping[str, RecipeRun]) -> Iterator[RecipeProblem]:
    """All problems of a recipe, which is not FP32."""
    run = runs[name]
    fp32 = runs["fp32"]
    problem = partial(RecipeProblem, name)
    for finding in run.findings:
        yield problem(finding.kind, f"{finding.text} ({finding.line})", line=finding.line)
    if run.failure is not None:
        yield problem("fails", f"the run stopped early: {run.failure}")
        return
    located = _located(run.skipped)
    blamed = f"; Inf or NaN first appears at {located.where}" if located is not None else ""
    module = (located.module or None) if located is not None else None
    ends_early = len(run.losses) < len(fp32.losses)
    if run.skipped and (run.scale is None or ends_early):
        at = f"in step {run.skipped[0].step} (batch {run.skipped[0].batch})"
        yield problem("not-finite", f"gradients or weights turn Inf or NaN {at}{blamed}", module)
        return
    if run.scale is not None and _skips_too_often(run, run.scale):
        batches = len({each.batch for each in run.skipped})
        said = f"{_skipped(run)}, on {batches} of the batches, and the loss scale falls to {run.scale:.3g}"
        yield problem("steps-skipped", said + blamed, module)
    yield from _wrong_losses(run, fp32, problem)
    is_behind = _is_behind(run, fp32)
    if is_behind and not run.bad_losses:
        said = f"the final loss is {run.last_loss():.4g}, in FP32 {fp32.last_loss():.4g}"
        yield problem("loss-behind", said)
    if not OF_SCALE.isdisjoint(each.kind for each in run.findings):  # whose consequences the gradients show
        return
    yield from _lost_entries(run, fp32, problem)
    error = run.share("error") or 0.0
    wide = runs.get(f"{name}_fp32_accumulation", run).share("error")
    if wide is not None and error > max(2 * wide, ROUNDED):
        said = f"gradients differ from FP32's by {error:.1%} after {run.backward_passes} backward passes,"
        yield problem("sums-rounded", f"{said} but only by {wide:.1%} if they are summed in FP32")
    yield from _wrong_gradients(run, fp32, problem)


def _wrong_gradients(run: RecipeRun, fp32: RecipeRun, problem: Callable[..., RecipeProblem]) -> Iterator[RecipeProblem]:
    """Gradients that differ too much from FP32's: those of all parameters together, or else those of one."""
    error = run.share("error") or 0.0
    tolerated = tolerated_error(fp32.share("error") or 0.0)
    resolved = (name for name in run.parameters if not fp32.is_rounding(name))
    worst = max(resolved, key=lambda name: run.share("error", name) or 0.0, default="")
    own = run.share("error", worst) or 0.0
    noise = fp32.share("error", worst) or 0.0
    module = run.parameters[worst].module if worst else ""
    is_kept = run.recipe.scopes.get(module) == {"precision": "fp32"}
    advice = ": keep its module in FP32" if module and not is_kept else ""
    if error > tolerated:
        most = f", most in {worst}{advice}" if worst else ""
        said = f"gradients differ from FP32's by {error:.0%}, above the tolerated {tolerated:.0%}{most}"
        yield problem("gradients-off", said, module or None)
    elif worst and own > max(ALONE, noise):
        together = f"although those of all parameters together only differ by {error:.1%}"
        said = f"gradients of {worst} differ from FP32's by {own:.0%}, {together}{advice}"
        yield problem("gradients-off", said, module or None)


def _skipped(run: RecipeRun) -> str:
    """How many steps of a run are skipped, in words."""
    verb = "is" if len(run.skipped) == 1 else "are"
    return f"{len(run.skipped)} of {len(run.losses)} steps {verb} skipped"


def _located(skipped: Sequence[NonFiniteStep]) -> NonFiniteStep | None:
    """The first of the steps with the most frequent operation to blame; None if no operation is known."""
    counts = Counter(each.where for each in skipped if each.where)
    known = [each for each in skipped if each.where]
    return max(known, key=lambda each: counts[each.where], default=None)


def _skips_too_often(run: RecipeRun, scale: float) -> bool:
    """Whether too many steps of the second half are skipped, or the loss scale fell below 1. scale: the last one."""
    steps = len(run.losses)
    late = sum(each.step >= steps // 2 for each in run.skipped)
    if late > max(SKIPS * steps / 2, 1):
        return True
    return bool(run.skipped) and scale < 1


def _is_behind(run: RecipeRun, fp32: RecipeRun) -> bool:
    """Whether the final loss exceeds FP32's by more than a share of FP32's progress and than the losses scatter.

    The weights count, and not how the step computes its loss: FP32's losses at the same weights have to be behind, too. A
    teacher in BF16, for example, has other targets than one in FP32.
    """
    loss = run.last_loss()
    fp32_loss = fp32.last_loss()
    count = len(run.final)
    gaps = [a - b for a, b in zip(run.final, fp32.final, strict=True)]
    scatter = 0.0  # two standard errors of the mean gap
    if count > 1 and math.isfinite(loss):
        scatter = 2 * statistics.stdev(gaps) / math.sqrt(count)
    progress = abs(statistics.fmean(fp32.losses[:count]) - fp32_loss)
    tolerated = max(BEHIND * progress, scatter, LEAST * abs(fp32_loss)) + _lag(run, fp32)
    if loss - fp32_loss <= tolerated:
        return False
    exact = _final_gaps(run, fp32)
    return not (exact and statistics.fmean(exact) <= tolerated)


def _lag(run: RecipeRun, fp32: RecipeRun) -> float:
    """By how much FP32's loss still falls in as many steps as the run skipped; 0 if those are too many."""
    skipped = len(run.skipped)
    if not skipped or skipped > max(DELAY * len(run.losses), 1):
        return 0.0
    if run.scale is None or _skips_too_often(run, run.scale):
        return 0.0
    count = len(run.final)
    first = len(fp32.losses) - count - skipped
    if first < 0:
        return 0.0
    return max(statistics.fmean(fp32.losses[first : first + count]) - fp32.last_loss(), 0.0)


def _final_gaps(run: RecipeRun, fp32: RecipeRun) -> list[float]:
    """FP32's losses at the weights of a run, less those of the run in FP32, in the sampled steps among the last."""
    first = len(run.losses) - len(run.final)
    pairs = zip(run.steps, run.exact_losses, strict=False)
    return [exact - fp32.losses[step] for step, exact in pairs if exact is not None and step >= first]


def _lost_entries(run: RecipeRun, fp32: RecipeRun, problem: Callable[..., RecipeProblem]) -> Iterator[RecipeProblem]:
    """Shares of updates or gradients that are lost: at most one problem of a kind, about all parameters or about one."""
    stored = label(run.recipe.format if run.recipe.stored else "fp32")
    for what, text in HARM.items():
        for parameter in ("", *run.parameters):  # first, all parameters together
            share = run.share(what, parameter) or 0.0
            usual = fp32.share(what, parameter) or 0.0
            allowed = ALL if parameter else LOST
            if share - usual > allowed:
                of_parameter = f", of {parameter}" if parameter else ""
                yield problem(what.replace("_", "-"), f"{share:.0%} {text.format(stored)}{of_parameter}")
                break


def _wrong_losses(run: RecipeRun, fp32: RecipeRun, problem: Callable[..., RecipeProblem]) -> Iterator[RecipeProblem]:
    """Losses that are wrong although the gradients are finite: Inf or NaN, or others than FP32's at the same weights."""
    bad = [each for each in run.bad_losses if math.isfinite(fp32.losses[each.step])]
    if bad:
        module = next((each.module for each in bad if each.where), None)
        yield problem("loss-not-finite", _said_of_bad_losses(run, bad), module or None)
    off = off_losses(run)
    if off is None:
        return
    low, right = off
    better = ", so that it looks better than it is" if low < right else ""
    said = f"the loss is {low:.3g}, in FP32 {right:.3g} at the same weights{better}"
    origin = run.loss_origin
    if origin is None:
        yield problem("loss-off", said, LOSS)
        return
    after = f"{origin.after:.2g}" if math.isfinite(origin.after) else "Inf"
    grown = f"the error begins at {origin.where}: relative to FP32, {origin.before:.2g} before and {after} after"
    yield problem("loss-off", f"{said}; {grown}", origin.module or LOSS)


def remedies_for(runs: Mapping[str, RecipeRun]) -> Iterator[Recipe]:
    """Repaired variants of recipes with a problem; for stored low-precision weights with many backward passes a step,
    also a variant that sums gradients in FP32. A recipe that fails has no variants."""
    for name, run in [*runs.items()]:  # the caller adds the runs of the variants
        recipe = run.recipe
        is_variant = recipe.remedies or recipe.ranks > 1  # a further recipe: the recipe that it changes has variants
        is_repaired_by_standard = name == AS_WRITTEN and not recipe.stored
        if name == "fp32" or run.failure is not None or is_variant or is_repaired_by_standard:
            continue
        problems = {problem.kind: problem for problem in problems_of(name, runs)}
        if recipe.stored:
            yield from _variants_of_stored(name, run, problems)
        else:
            yield from _variants_of_autocast(name, run, problems)


def _variants_of_stored(name: str, run: RecipeRun, problems: Mapping[str, RecipeProblem]) -> Iterator[Recipe]:
    """Variants of a recipe with weights in low precision. problems: {kind: problem}."""
    recipe = run.recipe
    remedies = list[str]()
    if run.backward_passes >= PASSES:
        remedies.append("fp32_accumulation")
    if problems and recipe.format == "fp16":
        remedies += ["eps", "fp32_master_weights"]
    elif problems and "not-finite" not in problems:
        remedies += ROUNDINGS
    for remedy in remedies:
        title = f"{label(recipe.format)} with {REMEDIES[remedy][0]}"
        yield replace(recipe, repairs=name, name=f"{name}_{remedy}", title=title, remedies=(remedy,))


def _variants_of_autocast(name: str, run: RecipeRun, problems: Mapping[str, RecipeProblem]) -> Iterator[Recipe]:
    """Variants of a recipe with FP32 weights: another loss scale, and the modules to blame in FP32. problems: {kind:
    problem}."""
    recipe = run.recipe
    lowers_scale = run.skipped and ("steps-skipped" in problems or "loss-behind" in problems)
    raises_scale = not lowers_scale and "gradients-off" in problems
    if run.scale is not None and run.scale >= 1 and (lowers_scale or raises_scale):
        scale = run.scale / HEADROOM if lowers_scale else run.scale * RAISE
        title = f"{recipe.title} with init_scale={scale:g}"
        yield replace(recipe, repairs=name, name=f"{name}_scale", title=title, scale=scale)
    blamed = dict.fromkeys(problem.module for problem in problems.values() if problem.module)
    if blamed:
        islands = {module: {"precision": "fp32"} for module in blamed}
        scopes = {"": {"precision": recipe.format}, **recipe.scopes, **islands}
        places = " and ".join("the loss" if module == LOSS else module for module in blamed)
        title = f"{recipe.title}, {places} in FP32"
        yield replace(recipe, repairs=name, name=f"{name}_islands", title=title, scopes=scopes)


def _preference(recipe: Recipe) -> tuple[bool, bool, bool]:
    """The sort key of recipes without a problem, the first of which is recommended: FP32 weights, no further change."""
    return recipe.stored, bool(recipe.remedies) or recipe.ranks > 1, recipe.repairs != ""


def recommend(runs: Mapping[str, RecipeRun], problems: Sequence[RecipeProblem]) -> tuple[str, str]:
    """The name of the recommended recipe, with the reason in a sentence or two."""
    fp32 = runs["fp32"]
    broken = {"fp32", *(problem.recipe for problem in problems)}
    holding = [run for name, run in runs.items() if name not in broken and run.recipe.format != "fp32"]
    found = _problems_as_written(runs, problems)
    if not holding:
        text = f"Train in FP32: every other recipe has a problem. The final loss is {fp32.last_loss():.4g}."
        return "fp32", f"{found}{text}"
    run, *others = sorted(holding, key=lambda run: _preference(run.recipe))
    is_own = run.recipe.name == AS_WRITTEN
    unchanged = "" if run.recipe.repairs or is_own else ", without further changes"
    sentences = [
        f"Train {'' if is_own else 'in '}{run.recipe.title}{unchanged}.",
        f"The final loss is {run.last_loss():.4g}, in FP32 {fp32.last_loss():.4g}.",
    ]
    if run.skipped:
        sentences.append(f"{_skipped(run)} until the loss scale settles at {run.scale:g}.")
    lean = [one.recipe for one in others if one.recipe.stored and "fp32_master_weights" not in one.recipe.remedies]
    if lean:
        sentences.append(f"There is no problem with {lean[0].title} either, which needs less memory.")
    return run.recipe.name, f"{found}{' '.join(sentences)}"


def _problems_as_written(runs: Mapping[str, RecipeRun], problems: Sequence[RecipeProblem]) -> str:
    """A sentence about the problems of the step as written; "" without any."""
    own = [problem for problem in problems if problem.recipe == AS_WRITTEN]
    if not own:
        return ""
    run, number = runs[AS_WRITTEN], "1 problem" if len(own) == 1 else f"{len(own)} problems"
    place = f" ({own[0].line})" if own[0].line else ""
    if run.failure is not None:
        outcome = f"it stops in step {len(run.losses)}"
    else:
        outcome = f"its final loss is {run.last_loss():.4g}, in FP32 {runs['fp32'].last_loss():.4g}"
    return f"As written, the step has {number}, the first is {own[0].kind}{place}; {outcome}. "
