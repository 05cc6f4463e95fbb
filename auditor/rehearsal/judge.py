"""Detects problems of a recipe, selects remedies, and recommends a recipe."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from ..numerics.formats import label
from ..training.recommend import HEADROOM
from ..training.step import LOSS
from .remedies import REMEDIES, ROUNDINGS
from .result import Recipe, RecipeProblem, RecipeRun

Runs = Mapping[str, RecipeRun]

LOST, ALL = 0.2, 0.9
"""Share of affected entries, beyond FP32's, from which there is a problem: in all parameters together, and in one."""
SKIPS = 0.02
"""Allowed share of skipped steps in the second half of a run: GradScaler sometimes tries a larger scale."""
BEHIND, LEAST = 0.05, 1e-3
"""A recipe's loss may exceed FP32's by these shares of FP32's loss reduction and of its loss, or by the losses'
scatter."""
OFF = 0.25
"""A relative gradient error of this size, late in a run, is a problem, unless the gradients of two batches differ by
four times the error or more."""
ROUNDED, PASSES = 0.01, 8
"""Smallest relative error of accumulated gradients worth reporting, if FP32 sums halve it; and the number of
backward passes per step that is enough to try FP32 sums."""
RAISE = 256
"""Factor on the initial loss scale of a variant; GradScaler halves the scale until gradients are finite."""
PREFERRED = ("bf16_autocast", "fp16_autocast", "plan")
HARM = {
    "updates_lost": "of the updates with a non-zero gradient change no weight, since the updates are below half a spacing of {}",
    "decay_lost": "of the weights are not changed by weight decay, since learning rate times decay is below half a spacing of {}",
    "second_moment_stuck": "of Adam's second moments should change, but stay constant",
    "second_moment_zero": "of Adam's second moments are zero although the gradient is not",
}
"""{share in ParameterSeries, which names the kind of problem: sentence about it}."""


def problems_of(runs: Runs) -> tuple[RecipeProblem, ...]:
    """All problems of all recipes except FP32."""
    return tuple(problem for name in runs if name != "fp32" for problem in _problems(name, runs))


def _problems(name: str, runs: Runs) -> Iterator[RecipeProblem]:
    run, fp32, problem = runs[name], runs["fp32"], partial(RecipeProblem, name)
    if run.failure is not None:
        yield problem("fails", f"the run stopped early: {run.failure}")
        return
    blamed, module = next(((f", the first at {x.where}", x.module or None) for x in run.skipped if x.where), ("", None))
    if run.scale is None and run.skipped:
        at = f"in step {run.skipped[0].step} (batch {run.skipped[0].batch})"
        yield problem("not-finite", f"gradients or weights turn Inf or NaN {at}{blamed}", module)
        return
    late = sum(each.step >= len(run.losses) // 2 for each in run.skipped)
    if run.scale is not None and (late > max(SKIPS * len(run.losses) / 2, 1) or run.scale < 1):
        batches = len({each.batch for each in run.skipped})
        said = f"{len(run.skipped)} of {len(run.losses)} steps are skipped, on {batches} of the batches, and the loss scale falls to {run.scale:.3g}"
        yield problem("steps-skipped", said + blamed, module)
    if not all(map(math.isfinite, run.final)):
        yield problem("loss-behind", "its final loss is Inf or NaN")
    else:
        last, whole, count = run.last_loss(), fp32.last_loss(), len(run.final)
        gaps = [a - b for a, b in zip(run.final, fp32.final, strict=True)]
        scatter = 2 * statistics.stdev(gaps) / math.sqrt(count) if count > 1 else 0.0
        progress = abs(statistics.fmean(fp32.losses[:count]) - whole)
        if last - whole > max(BEHIND * progress, scatter, LEAST * abs(whole)):
            yield problem("loss-behind", f"its final loss is {last:.4g}, FP32's {whole:.4g}")
    for what, text in HARM.items():
        for one in ("", *run.parameters):  # first, all parameters together
            share, usual = run.share(what, one) or 0.0, fp32.share(what, one) or 0.0
            if share - usual > (ALL if one else LOST):
                said = f"{share:.0%} {text.format(label(run.recipe.format))}{f', of {one}' if one else ''}"
                yield problem(what.replace("_", "-"), said)
                break
    error, noise, wide = run.error or 0.0, fp32.error or 0.0, runs.get(f"{name}_fp32_accumulation")
    if wide is not None and wide.error is not None and error > max(2 * wide.error, ROUNDED):
        said = f"its gradients differ from FP32's by {error:.1%} after {run.backward_passes} backward passes, and"
        yield problem("sums-rounded", f"{said} by {wide.error:.1%} where they are summed in FP32")
    if error > max(OFF, noise / 4):
        worst = max(run.parameters, key=lambda name: run.share("error", name) or 0.0)
        said = f"its gradients differ from FP32's by {error:.0%}, most in {worst}; gradients of two batches differ by {noise:.0%}"
        yield problem("gradients-off", said, worst.rpartition(".")[0])


def remedies_for(runs: Runs) -> Iterator[Recipe]:
    """Repaired variants of recipes with a problem; for stored low-precision weights with many backward passes a step,
    also a variant that sums gradients in FP32. A recipe that fails has no variants."""
    for name, run in [item for item in runs.items() if item[1].failure is None and item[0] != "fp32"]:
        own, problems = run.recipe, {p.kind: p for p in _problems(name, runs)}
        vary = partial(replace, own, repairs=name)
        if own.stored:
            low = ("eps", "fp32_master_weights") if own.format == "fp16" else ROUNDINGS * ("not-finite" not in problems)
            for remedy in ("fp32_accumulation",) * (run.backward_passes >= PASSES) + low * bool(problems):
                title = f"{label(own.format)} with {REMEDIES[remedy][0]}"
                yield vary(name=f"{name}_{remedy}", title=title, remedies=(remedy,))
            continue
        skips = run.skipped and not problems.keys().isdisjoint({"steps-skipped", "loss-behind"})
        if run.scale is not None and run.scale >= 1 and (skips or "gradients-off" in problems):
            scale = run.scale / HEADROOM if skips else RAISE * run.scale
            yield vary(name=f"{name}_scale", title=f"{own.title} with init_scale={scale:g}", scale=scale)
        places = [p.module for kind, p in problems.items() if kind in ("steps-skipped", "not-finite", "gradients-off")]
        whole = {"": {"precision": own.format}, **own.scopes}
        if LOSS in places:
            title = f"{own.title}, the loss in FP32"
            yield vary(name=f"{name}_loss_in_fp32", title=title, loss_in_fp32=True, scopes=whole)
        if islands := {place: {"precision": "fp32"} for place in places if place and place != LOSS}:
            title = f"{own.title}, {', '.join(islands)} in FP32"
            yield vary(name=f"{name}_islands", title=title, scopes={**whole, **islands})


def recommend(runs: Runs, problems: Sequence[RecipeProblem]) -> tuple[str, str]:
    """The name of the recommended recipe, with the reason in a sentence or two."""
    broken, fp32 = {"fp32", *(problem.recipe for problem in problems)}, runs["fp32"]
    holding = [run for name, run in runs.items() if name not in broken]
    if not holding:
        return "fp32", f"Train in FP32: every other recipe has a problem. The final loss is {fp32.last_loss():.4g}."
    holding.sort(key=lambda run: ([*PREFERRED, run.recipe.name].index(run.recipe.name), run.recipe.stored))
    run, done = holding[0], "" if holding[0].recipe.repairs else ", without further changes"
    text = f"Train in {run.recipe.title}{done}: its final loss is {run.last_loss():.4g}, FP32's {fp32.last_loss():.4g}"
    if skipped := len(run.skipped):
        text += f"; {skipped} of {len(run.losses)} steps are skipped until the loss scale settles at {run.scale:g}"
    lean = [one.recipe for one in holding[1:] if one.recipe.stored and "fp32_master_weights" not in one.recipe.remedies]
    saves = f" {lean[0].title} has no problem either, and needs less memory." if lean else ""
    return run.recipe.name, f"{text}.{saves}"
