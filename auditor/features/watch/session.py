"""Runs the step of a capsule in every recipe, each in a forked process: a rehearsal of one step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

from ...isolation.members import without_wrappers
from ...isolation.process import swap_attribute
from ...rehearsal.result import FP32
from ...rehearsal.session import Session
from ...rehearsal.trials import set_scales
from ...training.blame import blame
from ...training.step import LOSS
from .capsule import Capsule
from .origin import OriginTrail
from .steps import CapsuleStep

CAUSE = "; cause: "
"""Separates the operation from the cause in a run's `where`."""
FLUSH = "underflow: gradients become zero"
"""The cause of gradients that become zero."""


class ReplaySession(Session):
    """The step of a capsule, with the user's model, optimizers and scalers in the capsule's state.

    scalers_of_capsule: the user's scalers in the order of the capsule's. finished: ids of optimizers that had updated
    their weights before the capsule was written, and do so no more.
    """

    needs_finite_fp32 = False

    def __init__(self, step: CapsuleStep, capsule: Capsule, scalers: list[Any], finished: set[int]) -> None:
        self._capsule = capsule
        self._own_scalers = scalers
        self._finished = finished
        step.has_backward = lambda: bool(self._losses)
        super().__init__(step, self._one_batch, 0)

    def _one_batch(self) -> Iterator[tuple[int, Any]]:
        """The capsule's calls as the only batch. The scalers get their scales here, after a recipe was prepared."""
        scalers = self._own_scalers or self.scalers
        states = self._capsule.about.scalers
        for number, scaler in enumerate(scalers if states else ()):
            state = states[min(number, len(states) - 1)]
            if state.get("scale") is not None:
                set_scales([scaler], float(state["scale"]))
        yield 0, [one.batch for one in self._capsule.calls]

    def _update(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        groups = optimizer.param_groups
        if id(optimizer) in self._finished:
            groups = [{**group, "params": []} for group in groups]
        with swap_attribute(optimizer, "param_groups", groups):
            yield from super()._update(optimizer, args, kwargs)

    def _search(self, batch: Any, restart: Callable[[], None], tell: object) -> tuple[str, str | None]:
        """The operation to blame, its cause, and its module, see `blame`. If FP32 fails too, the origin of its first NaN."""
        names = {module: without_wrappers(path) for path, module in self.root.named_modules()}
        trails = dict[bool, OriginTrail]()
        losses = dict[bool, float]()

        def run(trail: OriginTrail, is_low: bool) -> None:
            restart()
            trails[is_low] = trail
            if not is_low:
                self._convert(FP32)
            losses[is_low] = self._call_step(batch, trail)

        def module_now() -> str:
            return next((names[one] for one in reversed(self._calls) if one in names), LOSS)

        words, module = blame(run, module_now, OriginTrail)
        fp32 = trails[False].first(math.isfinite(losses[False]))
        is_broken_in_fp32 = not math.isfinite(losses[False]) or trails[False].backward is not None
        if fp32 is not None and is_broken_in_fp32:
            return f"{fp32.words}{CAUSE}{fp32.cause}", fp32.module
        low = trails[True]
        if low.backward is not None and (not words or words.startswith(("the backward pass", "the weight's"))):
            return f"{low.backward.words}{CAUSE}{low.backward.cause}", low.backward.module
        return f"{words}{CAUSE}{low.causes.get(words, '')}" if words else "", module

    def search_underflow(self, tell: object) -> tuple[str, str | None]:
        """The first operation whose gradients become zero in the recipe as written, but not in FP32; ("", None) without
        one. Runs in the process of a recipe that was prepared."""
        ((_, batch),) = self._one_batch()
        restart = self._save_state()
        names = {module: without_wrappers(path) for path, module in self.root.named_modules()}
        flushed = dict[bool, list[tuple[str, str]]]()

        def run(trail: OriginTrail, is_low: bool) -> None:
            restart()
            if not is_low:
                self._convert(FP32)
            self._call_step(batch, trail)
            flushed[is_low] = trail.flushed

        blame(run, lambda: next((names[one] for one in reversed(self._calls) if one in names), LOSS), OriginTrail)
        new = [one for one in flushed[True] if one not in flushed[False]]
        return (f"{new[0][0]}{CAUSE}{FLUSH}", new[0][1]) if new else ("", None)


def zero_share(run: Any) -> dict[str, float]:
    """{parameter: share of its gradient that is zero} in a run of one step."""
    known = {name: series.zero_gradient for name, series in run.parameters.items()}
    return {name: values[-1] for name, values in known.items() if values and values[-1] is not None}


def is_stored_low(model: Any) -> bool:
    """Whether a parameter is stored in FP16 or BF16."""
    return any(p.dtype in (torch.float16, torch.bfloat16) for p in model.parameters())
