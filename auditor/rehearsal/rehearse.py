"""Runs every recipe from the same initial state, each in a process forked from the caller's."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

from ..artefact.base import plan_table
from ..errors import AuditorError, let_through
from ..loading.target import guard_progress
from ..numerics.devices import NATIVE
from ..numerics.formats import dtype_of
from ..records import Plan, Progress
from ..records.audit import Audit
from .judge import problems_of, recommend, remedies_for
from .result import FP32, Recipe, RecipeRun, Rehearsal
from .session import Session, bad_step, call_forked

Batches = Iterable[Any] | Callable[[], Iterable[Any]] | None
FIRST_SCALE = 65536.0
"""GradScaler's default initial scale."""
RECIPES = (
    Recipe("bf16_autocast", "BF16 under autocast", "bf16"),
    Recipe("fp16_autocast", "FP16 under autocast, GradScaler", "fp16", scale=FIRST_SCALE),
    Recipe("bf16", "BF16 throughout", "bf16", stored=True),
)


def rehearse(
    step: Callable[..., Any],
    batches: Batches = None,
    steps: int = 200,
    *,
    plan: Audit | Plan | None = None,
    seed: int = 0,
    remedies: bool = True,
    progress: Progress | None = None,
    target: str = "",
) -> Rehearsal:
    """Run a training step `steps` times in each recipe and in FP32, emulating a GPU on a CPU, in forked processes.

    step: called as `step(batch)`, or `step(*batch)` if it takes several arguments, or `step()`. The step runs forward,
    `backward()` and the optimizers' `step()`, in FP32 or with its own autocast regions and GradScaler; recipes set the
    dtype of such regions. Model and optimizers must already exist. batches: an iterable, or a function that returns one
    for each pass; repeated if too short. At the end of an iterator, the rehearsal ends. plan: an audit, or one of its
    plans, to rehearse too. remedies: whether recipes with a problem are repaired and run again. progress: called as
    progress(stage, detail, done, total). Raises: LoadError(slug="bad-step") for a step that cannot be rehearsed, or
    fails in FP32; CallbackError(slug="bad-callback") if `progress` raises.
    """
    if not callable(step) or isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise bad_step("rehearse needs a function that runs one step, and a whole number of steps")
    if not hasattr(os, "fork"):
        raise bad_step("a rehearsal forks this process, which this system does not support: use Linux or macOS")
    tell, session = guard_progress(progress or (lambda *_: None)), Session(step)

    def run(recipe: Recipe, steps: int = steps) -> RecipeRun:
        losses: list[float] = []

        def hear(said: str) -> None:
            losses.append(float(said.split()[-1]))
            tell("rehearse", recipe.title, len(losses), steps)

        try:
            work = partial(session.run, recipe, _number_batches(batches), steps, seed)
            result, session.used, session.own_regions = call_forked(work, hear)
        except AuditorError as error:
            let_through(error)
            if recipe == FP32:
                raise bad_step(f"the step fails in FP32: {error}") from error
            return RecipeRun(recipe, losses, failure=str(error))
        return result

    if not run(FP32, 1).batches:
        raise bad_step("batches is empty: give at least one batch")
    if not session.used:
        raise bad_step("the step calls no optimizer's step(): give a function that runs one whole training step")
    session.narrow()
    if any(p.device.type in NATIVE for p in session.group_numbers):
        raise bad_step("the model is on a GPU: move model and batches to the CPU, where a rehearsal emulates a GPU")
    recipes, runs = [*_recipes(session, plan)], {"fp32": run(FP32)}
    if skipped := runs["fp32"].skipped:
        at = f"in step {skipped[0].step} (batch {skipped[0].batch})"
        raise bad_step(f"the step fails in FP32, since gradients or weights turn Inf or NaN {at}: fix the step first")
    runs |= {recipe.name: run(recipe) for recipe in recipes}
    runs |= {recipe.name: run(recipe) for recipe in (remedies_for(runs) if remedies else ())}
    problems = problems_of(runs)
    name = target or getattr(step, "__qualname__", type(step).__name__)
    return Rehearsal(name, len(runs["fp32"].losses), runs["fp32"].batches, runs, problems, *recommend(runs, problems))


def _recipes(session: Session, plan: Audit | Plan | None) -> Iterator[Recipe]:
    """The standard recipes, the unchanged model if it is stored in low precision, and the recipe of a plan."""
    yield from RECIPES
    dtypes = {p.dtype for p in session.group_numbers}
    if (low := next((fmt for fmt in ("fp16", "bf16") if dtype_of(fmt) in dtypes), None)) is not None:
        yield Recipe("as_written", f"unchanged, in {low.upper()}", low, stored=True)
    if isinstance(plan, Audit):
        trained = (plan.plans.get(name or "") for name in (plan.recommended, "autocast_bf16", "autocast_fp16"))
        plan = next((one for one in trained if one is not None and one.strategy == "autocast"), None)
    if plan is not None:
        if plan.strategy != "autocast":
            raise bad_step(f"the plan {plan.name!r} has strategy {plan.strategy}: give an autocast plan")
        scale = FIRST_SCALE if plan.format == "fp16" else None
        scopes = plan_table(plan)["scopes"]
        yield Recipe("plan", f"the plan {plan.name}", plan.format, scale=scale, scopes=scopes, loss_in_fp32=True)


def _number_batches(batches: Batches) -> Iterator[tuple[int, Any]]:
    """Yield (number, batch), and repeat the batches endlessly; an iterator ends after one pass, an empty iterable at
    once."""
    while True:
        number, made = -1, [None] if batches is None else batches() if callable(batches) else batches
        for number, batch in enumerate(made):
            yield number, batch
        if number < 0 or (made is batches and iter(made) is made):
            return
