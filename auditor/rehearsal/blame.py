"""Finds the operation of a training step that is the first to give Inf or NaN in low precision but not in FP32."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from types import CodeType
from typing import Any

import torch

from ..capture.emulation import Emulation
from ..capture.regions import Region
from ..capture.source import line_of, written_at
from ..isolation.tensors import plain_torch
from ..numerics.entries import all_finite, tensors_in
from ..training.step import LOSS

NO_PASS = -1
"""Torch's id of the backward pass while no pass runs. Operations of a pass are not recorded: hooks check gradients."""


class Trail(Emulation):
    """Records where Inf or NaN appear. module: returns the name of the innermost module being called. outermost: the
    code object that calls the user's code. broken: (operation in words, its module), in order of detection."""

    def __init__(self, module: Callable[[], str], outermost: CodeType) -> None:
        super().__init__()
        self._module, self._outermost = module, outermost
        self.broken: list[tuple[str, str]] = []

    def enter(
        self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], region: Region
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        for x in tensors_in((args, kwargs)):
            if x.requires_grad and torch._C._current_graph_task_id() == NO_PASS:
                stage = "the weight's gradient in " if x.is_leaf else "the backward pass of "
                x.register_hook(partial(self._hear, stage, *self._describe(op)))  # type: ignore[no-untyped-call]
        return super().enter(op, args, kwargs, region)

    def part(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], region: Region) -> Any:
        result = super().part(op, args, kwargs, region)
        if torch._C._current_graph_task_id() == NO_PASS:
            for x in filter(torch.is_floating_point, tensors_in(result)):
                self._hear("", *self._describe(op), x.detach())
        return result

    def _describe(self, op: Any) -> tuple[str, str]:
        name, module = getattr(op, "_opname", None) or getattr(op, "__name__", op), self._module()
        place = f" ({line_of(written.place)})" if (written := written_at(self._outermost)) else ""
        return f"{name}{f' in {module}' if module not in ('', LOSS) else ''}{place}", module

    def _hear(self, stage: str, words: str, module: str, value: torch.Tensor) -> None:
        with plain_torch():
            if not all_finite(value):
                self.broken.append((f"{stage}{words}", module))


def blame(low: Trail, fp32: Trail) -> tuple[str, str | None]:
    """The first operation that gives Inf or NaN in low precision more often than in FP32 up to there, in words, and its
    module; ("", None) without one. FP32 gives Inf too, for example in masks."""
    known = Counter(fp32.broken)
    for one in low.broken:
        if not known[one]:
            return one
        known[one] -= 1
    return "", None
