"""Finds the operation of a training step that is the first to give Inf or NaN in low precision but not in FP32."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from ..capture.calls import Calls
from ..capture.source import line_of, written_at
from ..emulation.emulate import Emulation
from ..emulation.regions import Region
from ..isolation.tensors import plain_torch
from ..numerics.entries import all_finite, entries, tensors_in
from .replay import Step
from .step import FP32, LOSS, StepPrecision, TrainingStep, own_step, owner_of

NO_PASS = -1
"""Torch's id of the backward pass if none runs. Operations inside a pass are skipped, as hooks check the gradients."""


class Trail(Emulation):
    """Detects where Inf or NaN appear. module: returns the name of the innermost module being called. tell: called with
    (operation in words, its module) at each Inf or NaN. first_nan: the first of these with NaN."""

    def __init__(self, module: Callable[[], str], tell: Callable[..., object]) -> None:
        super().__init__()
        self._module, self._tell = module, tell
        self.first_nan: tuple[str, str] | None = None

    def cast_arguments(
        self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], region: Region
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        for x in tensors_in((args, kwargs)):
            if x.requires_grad and torch._C._current_graph_task_id() == NO_PASS:
                stage = "the weight's gradient in " if x.is_leaf else "the backward pass of "
                x.register_hook(partial(self._hear, stage, *self._describe(op)))  # type: ignore[no-untyped-call]
        return super().cast_arguments(op, args, kwargs, region)

    def run_leaf_op(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], region: Region) -> Any:
        result = super().run_leaf_op(op, args, kwargs, region)
        if torch._C._current_graph_task_id() == NO_PASS:
            for x in filter(torch.is_floating_point, tensors_in(result)):
                self._hear("", *self._describe(op), x.detach())
        return result

    def _describe(self, op: Any) -> tuple[str, str]:
        name, module = getattr(op, "_opname", None) or getattr(op, "__name__", op), self._module()
        place = f" ({line_of(written.place)})" if (written := written_at(blame.__code__)) else ""
        return f"{name}{f' in {module}' if module not in ('', LOSS) else ''}{place}", module

    def _hear(self, stage: str, words: str, module: str, value: torch.Tensor) -> None:
        with plain_torch():
            if not all_finite(value):
                if self.first_nan is None and bool(entries(value).isnan().any()):
                    self.first_nan = f"{stage}{words}", module
                self._tell((f"{stage}{words}", module))


def blame(
    run: Callable[..., object], module: Callable[[], str], kind: Callable[..., Trail] = Trail
) -> tuple[str, str | None]:
    """The first operation, in words, that gives Inf or NaN in low precision but not in FP32, and its module; ("", None)
    without one. run: called as run(Trail, is_low), runs the step. module: see Trail. kind: makes a Trail."""
    broken = dict[bool, list[tuple[str, str]]]()
    for is_low in (True, False):
        found = list[tuple[str, str]]()
        run(kind(module, found.append), is_low)
        broken[is_low] = [*found]  # hooks of the weights stay, and add to `found` in the next run
    known = Counter(broken[False])
    for one in broken[True]:
        if not known[one]:
            return one
        known[one] -= 1
    return "", None


def overflow_of(step: Step, low: StepPrecision, scale: float) -> tuple[str, str | None]:
    """The first operation that gives Inf or NaN in a step at a loss scale, see `blame`."""
    calls = Calls(TrainingStep(step.subject.model, None))

    def run(trail: Trail, is_low: bool) -> None:
        own_step(step, replace(low if is_low else FP32, handler=trail), scale)

    with calls.watch(lambda call, result: None):
        return blame(run, lambda: owner_of(calls.open[-1].path))
