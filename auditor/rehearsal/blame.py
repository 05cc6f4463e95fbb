"""Locates the first operation whose result or gradient is Inf or NaN although it is finite in FP32."""

from __future__ import annotations

from functools import partial
from types import CodeType
from typing import Any

import torch

from ..capture.emulation import Emulation
from ..capture.regions import Region
from ..capture.source import line_of, written_at
from ..isolation.tensors import plain_torch
from ..numerics.entries import all_finite
from ..training.step import LOSS
from ..trees import tensors_in

FORWARD, BACKWARD, WEIGHT = "", "the backward pass of ", "the weight's gradient in "


class Trail(Emulation):
    """Records where Inf or NaN appear. modules: names of the modules being called, innermost last. outermost: the code
    object that calls the user's code."""

    def __init__(self, modules: list[str], outermost: CodeType) -> None:
        super().__init__()
        self._modules, self._outermost = modules, outermost
        self.operations: list[tuple[str, str, str]] = []
        """(name, module, line) of each operation."""
        self.broken: list[tuple[str, int]] = []
        """(FORWARD, BACKWARD or WEIGHT; number of an operation), in order of detection."""
        self._readers: dict[int, int] = {}
        """{number of an operation: number of the last that reads its result}."""

    def whole(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], region: Region) -> Any:
        return self._note(op, args, kwargs, super().part(op, *self.enter(op, args, kwargs, region), region))

    def part(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], region: Region) -> Any:
        return self._note(op, args, kwargs, super().part(op, args, kwargs, region))

    def _note(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
        if torch._C._current_graph_task_id() != -1:  # in a backward pass, which the hooks observe
            return result
        number, place = len(self.operations), written_at(self._outermost)
        name = str(getattr(op, "_opname", None) or getattr(op, "__name__", op))
        self.operations.append((name, (self._modules or [LOSS])[-1], line_of(place.place) if place else ""))
        for x in tensors_in((args, kwargs)):
            if (source := getattr(x, "_made_by", None)) is not None:
                self._readers[source] = number
            elif x.requires_grad and x.is_leaf:
                x.register_hook(partial(self._hear, WEIGHT, number))  # type: ignore[no-untyped-call]
        for x in filter(torch.is_floating_point, tensors_in(result)):
            self._hear(FORWARD, number, x.detach())
            if x.requires_grad:
                x._made_by = number  # type: ignore[attr-defined]
                x.register_hook(partial(self._hear, BACKWARD, number))  # type: ignore[no-untyped-call]
        return result

    def _hear(self, stage: str, number: int, value: torch.Tensor) -> None:
        """Record a value with Inf or NaN; a result's gradient is blamed on the operation that reads the result."""
        with plain_torch():
            if not all_finite(value):
                self.broken.append((stage, self._readers.get(number, number) if stage == BACKWARD else number))


def first_to_blame(low: Trail, fp32: Trail) -> tuple[str, str | None]:
    """The operation to blame, as a phrase, and its module; "" and None if FP32's result is not finite either."""
    for stage, number in low.broken:
        if (stage, number) not in fp32.broken:
            name, module, line = low.operations[number]
            place = f"{f' in {module}' if module and module != LOSS else ''}{f' ({line})' if line else ''}"
            return f"{stage}{name}{place}", module
    return "", None
