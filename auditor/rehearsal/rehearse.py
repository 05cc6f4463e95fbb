"""Runs every recipe from the same initial state, each in a process forked from the caller's."""

from __future__ import annotations

import os
import pickle
import select
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from ..devices import NATIVE
from ..errors import CallbackError, LoadError
from ..isolation.process import reseed
from ..loading.target import blame
from ..processes import how_ended
from ..records import Plan
from ..records.audit import Audit
from .judge import problems_of, recommend, remedies_for
from .result import Recipe, RecipeRun, Rehearsal
from .scene import Scene, known_objects
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
"""Number of sampled steps, where gradients and updates are compared with FP32's."""

Tell = Callable[[str, str, int, int], None]


def rehearse(
    step: Callable[..., Any],
    batches: Iterable[Any] | None = None,
    steps: int = 200,
    *,
    plan: Audit | Plan | None = None,
    seed: int = 0,
    remedies: bool = True,
    progress: Tell | None = None,
    target: str = "",
) -> Rehearsal:
    """Run a training step `steps` times in each recipe and in FP32, emulating a GPU on a CPU; all state is restored.

    step: called as `step(batch)`, or `step(*batch)` where it takes several arguments, or `step()`. It runs forward,
    `backward()` and the optimizers' `step()` once, in FP32, or with autocast and a GradScaler of its own, whose regions
    are then used. Model and optimizers must already exist. batches: an iterable, repeated if too short. plan: an audit,
    or one of its plans, to rehearse too. remedies: whether recipes with a problem are repaired and run again. progress:
    called as progress(stage, detail, done, total). Raises: LoadError(slug="bad-step") for a step that cannot be
    rehearsed, or fails in FP32.
    """
    if not callable(step) or isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise LoadError(
            "rehearse(step, batches, steps) needs a function that runs one training step, and a number of steps",
            "bad-step",
        )
    if not hasattr(os, "fork"):
        raise LoadError(
            "a rehearsal forks this process, which this system does not support: use Linux or macOS", "bad-step"
        )
    known = known_objects()
    rehearsal = _Rehearsing(step, batches, steps, seed, progress or (lambda *_: None))
    seen = rehearsal.look(known)
    scene = Scene(known=known, own_regions=seen["own_regions"], backward_passes=seen["backward_passes"])
    used = {one: known[one] for one in seen["used"]}
    scene.modules = {key: one for key, one in used.items() if isinstance(one, torch.nn.Module)}
    scene.optimizers = {key: one for key, one in used.items() if isinstance(one, torch.optim.Optimizer)}
    _require(scene, seen["unknown"])
    recipes = _recipes(scene, plan)
    runs = {name: rehearsal.run(recipe, scene) for name, recipe in recipes.items()}
    if (failure := runs["fp32"].failure) is not None or not runs["fp32"].finite_weights:
        raise LoadError(
            f"the step already fails in FP32: {failure or 'its weights turn Inf or NaN'}; fix it first", "bad-step"
        )
    for recipe in remedies_for(runs) if remedies else ():
        runs[recipe.name] = rehearsal.run(recipe, scene)
    problems = problems_of(runs)
    chosen, why = recommend(runs, problems)
    name = target or getattr(step, "__qualname__", type(step).__name__)
    return Rehearsal(name, steps, runs["fp32"].batches, runs, problems, chosen, why)


def _require(scene: Scene, unknown: Sequence[str]) -> None:
    if unknown:
        raise LoadError(
            f"the step creates its own {unknown[0]}: create model and optimizers before, so that "
            "every run can start from them",
            "bad-step",
        )
    if not scene.optimizers:
        raise LoadError(
            "the step calls no optimizer's step(): give a function that runs one whole training step", "bad-step"
        )
    tensors = [p for o in scene.optimizers.values() for group in o.param_groups for p in group["params"]]
    if any(p.device.type in NATIVE for p in tensors):
        raise LoadError(
            "the model is on a GPU: a rehearsal runs on the CPU and emulates a GPU; move model and batches to the CPU",
            "bad-step",
        )


def _recipes(scene: Scene, plan: Audit | Plan | None) -> dict[str, Recipe]:
    """The standard recipes, the model's own precision if it is stored low, and a plan's."""
    recipes = list(RECIPES)
    parameters = [p for o in scene.optimizers.values() for group in o.param_groups for p in group["params"]]
    low = next(
        (
            fmt
            for fmt, dtype in (("fp16", torch.float16), ("bf16", torch.bfloat16))
            if any(p.dtype is dtype for p in parameters)
        ),
        None,
    )
    if low is not None:
        recipes.append(Recipe("as_written", f"unchanged, in {low.upper()}", low, stored=True))
    if isinstance(plan, Audit):
        trained = (plan.plans.get(name or "") for name in (plan.recommended, "autocast_bf16", "autocast_fp16"))
        plan = next((one for one in trained if one is not None and one.strategy == "autocast"), None)
    if plan is not None:
        if plan.strategy != "autocast":
            raise LoadError(
                f"the plan {plan.name!r} has the strategy {plan.strategy}: only autocast plans can be trained",
                "bad-step",
            )
        scopes = {path: choice.precision for path, choice in plan.scopes.items() if path}
        scale = FIRST_SCALE if plan.format == "fp16" else None
        recipes.append(Recipe("plan", f"the plan {plan.name}", plan.format, scale=scale, scopes=scopes))
    return {recipe.name: recipe for recipe in recipes}


class _Rehearsing:
    """The step and its initial state."""

    def __init__(
        self, step: Callable[..., Any], batches: Iterable[Any] | None, steps: int, seed: int, tell: Tell
    ) -> None:
        self.step, self.batches, self.steps, self.seed, self.tell = step, batches, steps, seed, tell
        every = max(steps // LOOKS, 1)
        self.samples = sorted({0, *range(0, steps, every), steps - 1})

    def look(self, known: dict[int, Any]) -> dict[str, Any]:
        """Detect the models and optimizers that a step uses. Raises: LoadError(slug="bad-step")."""

        def work(send: Callable[[Any], None]) -> None:
            session = Session(FP32, Scene(known=known), self.step)
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
            raise LoadError(value, "bad-step")
        found: dict[str, Any] = value
        return found

    def run(self, recipe: Recipe, scene: Scene) -> RecipeRun:
        """Run one recipe."""

        def work(send: Callable[[Any], None]) -> None:
            session = Session(recipe, replace(scene), self.step)
            session.prepare()
            result = session.run(
                _number_batches(self.batches), self.steps, self.samples, lambda done: send(("step", done))
            )
            send(("done", result))

        kind, value = self._run_forked(recipe.title, work)
        if kind == "bad":
            return RecipeRun(recipe, failure=value)
        result: RecipeRun = value
        return result

    def _run_forked(self, title: str, work: Callable[[Callable[[Any], None]], None]) -> tuple[str, Any]:
        """Fork a process for `work` and return its last message: ("done", value), or ("bad", reason)."""
        there, here = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        child = os.fork()
        if child == 0:
            try:
                os.close(there)
                null = os.open(os.devnull, os.O_RDWR)
                for stream in (1, 2):  # the user's step says the same in every recipe
                    os.dup2(null, stream)
                torch.set_num_threads(1)  # threads do not survive a fork
                reseed(self.seed)
                with os.fdopen(here, "wb") as answer:

                    def send(message: Any) -> None:
                        pickle.dump(message, answer)
                        answer.flush()

                    try:
                        work(send)
                    except (Exception, SystemExit) as error:
                        send(("bad", blame(error)))
            finally:
                os._exit(0)
        os.close(here)
        last: tuple[str, Any] = ("bad", "")
        with os.fdopen(there, "rb") as pipe:
            try:
                while True:
                    select.select([pipe], [], [])
                    last = pickle.load(pipe)
                    if last[0] == "step":
                        self._report_progress(title, last[1])
            except EOFError:
                _, status = os.waitpid(child, 0)
            except BaseException:
                os.kill(child, 9)
                os.waitpid(child, 0)
                raise
        if last[0] in ("step", "bad") and not (last[0] == "bad" and last[1]):
            return "bad", f"its process {how_ended(os.waitstatus_to_exitcode(status))}"
        return last

    def _report_progress(self, title: str, done: int) -> None:
        try:
            self.tell("rehearse", title, done, self.steps)
        except Exception as error:
            raise CallbackError(
                f"progress raised {blame(error)}: it is called as progress(stage, detail, done, total)", "bad-callback"
            ) from error


def _number_batches(batches: Iterable[Any] | None) -> Iterator[tuple[int, Any]]:
    """Batches with their numbers, repeated endlessly; an empty iterable ends it."""
    if batches is None:
        while True:
            yield 0, None
    while True:
        number = -1
        for number, batch in enumerate(batches):
            yield number, batch
        if number < 0 or iter(batches) is batches:
            return
