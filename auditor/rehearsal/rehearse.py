"""Runs every recipe from the same initial state, each in a process forked from the caller's."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from multiprocessing import Pipe, get_context
from typing import Any

import torch

from ..devices import NATIVE
from ..errors import LoadError
from ..isolation.process import reseed
from ..loading.target import blame, guard_progress
from ..numerics.formats import dtype_of
from ..processes import how_ended
from ..records import Plan, Progress
from ..records.audit import Audit
from .judge import problems_of, recommend, remedies_for
from .result import Recipe, RecipeRun, Rehearsal
from .scene import Scene, bad_step, known_objects
from .session import Session

FP32 = Recipe("fp32", "FP32")
FIRST_SCALE = 65536.0
"""GradScaler's default initial scale."""
RECIPES = (
    FP32,
    Recipe("bf16_autocast", "BF16 under autocast", "bf16"),
    Recipe("fp16_autocast", "FP16 under autocast, GradScaler", "fp16", scale=FIRST_SCALE),
    Recipe("bf16", "BF16 throughout", "bf16", stored=True),
)
LOOKS = 24
"""Number of sampled steps, in which gradients and updates are compared with FP32's."""


def rehearse(
    step: Callable[..., Any],
    batches: Iterable[Any] | None = None,
    steps: int = 200,
    *,
    plan: Audit | Plan | None = None,
    seed: int = 0,
    remedies: bool = True,
    progress: Progress | None = None,
    target: str = "",
) -> Rehearsal:
    """Run a training step `steps` times in each recipe and in FP32, emulating a GPU on a CPU; all state is restored.

    step: called as `step(batch)`, or `step(*batch)` if it takes several arguments, or `step()`. It runs forward,
    `backward()` and the optimizers' `step()` once, in FP32, or with autocast regions and a GradScaler of its own; these
    regions are then used. Model and optimizers must already exist. batches: an iterable, repeated if too short. plan:
    an audit, or one of its plans, to rehearse too. remedies: whether recipes with a problem are repaired and run again.
    progress: called as progress(stage, detail, done, total). Raises: LoadError(slug="bad-step") for a step that cannot
    be rehearsed, or fails in FP32; CallbackError(slug="bad-callback") if `progress` raises.
    """
    if not callable(step) or isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise bad_step("rehearse(step, batches, steps) needs a function that runs one step, and a number of steps")
    if not hasattr(os, "fork"):
        raise bad_step("a rehearsal forks this process, which this system does not support: use Linux or macOS")
    rehearsal = _Setup(step, batches, steps, seed, guard_progress(progress or (lambda *_: None)))
    scene = rehearsal.look(known_objects())
    runs = {recipe.name: rehearsal.run(recipe, scene) for recipe in _recipes(scene, plan)}
    if (failure := runs["fp32"].failure) is not None or not runs["fp32"].finite_weights:
        raise bad_step(
            f"the step already fails in FP32: {failure or 'its weights turn Inf or NaN'}; fix the step first"
        )
    for recipe in remedies_for(runs) if remedies else ():
        runs[recipe.name] = rehearsal.run(recipe, scene)
    problems = problems_of(runs)
    chosen, why = recommend(runs, problems)
    name = target or getattr(step, "__qualname__", type(step).__name__)
    return Rehearsal(name, steps, runs["fp32"].batches, runs, problems, chosen, why)


def _recipes(scene: Scene, plan: Audit | Plan | None) -> list[Recipe]:
    """The standard recipes, the model's own precision if it is stored in low precision, and the recipe of a plan."""
    recipes, dtypes = list(RECIPES), {p.dtype for p in scene.group_numbers}
    if (low := next((fmt for fmt in ("fp16", "bf16") if dtype_of(fmt) in dtypes), None)) is not None:
        recipes.append(Recipe("as_written", f"unchanged, in {low.upper()}", low, stored=True))
    if isinstance(plan, Audit):
        trained = (plan.plans.get(name or "") for name in (plan.recommended, "autocast_bf16", "autocast_fp16"))
        plan = next((one for one in trained if one is not None and one.strategy == "autocast"), None)
    if plan is not None:
        if plan.strategy != "autocast":
            raise bad_step(f"the plan {plan.name!r} has strategy {plan.strategy}: only autocast plans can be trained")
        scopes = {path: choice.precision for path, choice in plan.scopes.items() if path}
        scale = FIRST_SCALE if plan.format == "fp16" else None
        recipes.append(Recipe("plan", f"the plan {plan.name}", plan.format, scale=scale, scopes=scopes))
    return recipes


@dataclass(frozen=True)
class _Setup:
    """The user's step, its batches and the options of the rehearsal."""

    step: Callable[..., Any]
    batches: Iterable[Any] | None
    steps: int
    seed: int
    tell: Progress

    def look(self, known: dict[int, Any]) -> Scene:
        """Detect the models and optimizers that a step uses. Raises: LoadError(slug="bad-step")."""
        scene = Scene(known=known)

        def work(send: Callable[[Any], None]) -> None:
            session = Session(FP32, scene, self.step)
            try:
                _, batch = next(_number_batches(self.batches))
                send(("done", session.look(batch)))
            except StopIteration:
                send(("bad", "batches is empty: give at least one batch"))
            except LoadError as error:
                send(("bad", str(error)))
            except (Exception, SystemExit) as error:
                send(("bad", f"the step raised {blame(error)} in FP32"))

        kind, value = self._run_forked("look", work)
        if kind == "bad":
            raise bad_step(value)
        used, unknown, scene.own_regions, scene.backward_passes = value
        if unknown:
            raise bad_step(
                f"the step creates its own {unknown[0]}: create model and optimizers before, so that "
                "every run can start from them"
            )
        scene.modules = {one: known[one] for one in used if isinstance(known[one], torch.nn.Module)}
        scene.optimizers = {one: known[one] for one in used if isinstance(known[one], torch.optim.Optimizer)}
        if not scene.optimizers:
            raise bad_step("the step calls no optimizer's step(): give a function that runs one whole training step")
        if any(p.device.type in NATIVE for p in scene.group_numbers):
            raise bad_step("the model is on a GPU: move the model and the batches to the CPU, which emulates a GPU")
        return scene

    def run(self, recipe: Recipe, scene: Scene) -> RecipeRun:
        """Run one recipe in a forked process."""

        def work(send: Callable[[Any], None]) -> None:
            session = Session(recipe, replace(scene), self.step)
            session.prepare()
            samples = {*range(0, self.steps, max(self.steps // LOOKS, 1)), self.steps - 1}
            batches = _number_batches(self.batches)
            send(("done", session.run(batches, self.steps, samples, lambda done: send(("step", done)))))

        kind, value = self._run_forked(recipe.title, work)
        if kind == "bad":
            return RecipeRun(recipe, failure=value)
        result: RecipeRun = value
        return result

    def _run_forked(self, title: str, work: Callable[[Callable[[Any], None]], None]) -> tuple[str, Any]:
        """Fork a process for `work` and return its last message: ("done", value), or ("bad", reason)."""

        def answer() -> None:
            null = os.open(os.devnull, os.O_RDWR)
            for stream in (1, 2):  # the user's step prints the same in every recipe
                os.dup2(null, stream)
            torch.set_num_threads(1)  # threads do not survive a fork
            reseed(self.seed)
            try:
                work(there.send)
            except (Exception, SystemExit) as error:
                there.send(("bad", blame(error)))

        here, there = Pipe(duplex=False)
        child = get_context("fork").Process(target=answer)
        child.start()
        there.close()
        last: tuple[str, Any] = ("step", 0)
        try:
            while True:
                last = here.recv()
                if last[0] == "step":
                    self.tell("rehearse", title, last[1], self.steps)
        except EOFError:
            child.join()
        finally:
            child.kill()
            child.join()
            here.close()
        return ("bad", f"its process {how_ended(child.exitcode or 0)}") if last[0] == "step" else last


def _number_batches(batches: Iterable[Any] | None) -> Iterator[tuple[int, Any]]:
    """(number, batch) of the batches, repeated endlessly; ends if they are empty, or an iterator that cannot be
    repeated."""
    if batches is None:
        while True:
            yield 0, None
    while True:
        number = -1
        for number, batch in enumerate(batches):
            yield number, batch
        if number < 0 or iter(batches) is batches:
            return
