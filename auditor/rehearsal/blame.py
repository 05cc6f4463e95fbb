"""Locates the first operation whose result or gradient is Inf or NaN although it is finite in FP32."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from functools import partial
from types import CodeType
from typing import Any

import torch

from ..capture.intercept import Handler
from ..capture.regions import Region
from ..capture.source import line_of, written_at
from ..isolation.tensors import plain_torch
from ..numerics.entries import all_finite
from ..training.step import LOSS
from ..trees import tensors_in


class Trail(Handler):
    """Runs operations through another handler, and records whether each result and its gradient are finite."""

    def __init__(self, handler: Handler, modules: list[str], outermost: CodeType) -> None:
        """modules: names of the modules being called, innermost last. outermost: code whose frame calls the user's."""
        self._handler, self._modules, self._outermost = handler, modules, outermost
        self.enter = handler.enter  # type: ignore[method-assign]
        self.operations: list[tuple[str, str, str]] = []
        """(name, module, line) of each operation."""
        self.forward: list[int] = []
        self.backward: list[int] = []
        """Numbers of operations with a non-finite result, or gradient of the result, in order of detection."""
        self.weights: list[int] = []
        """Numbers of operations that read a weight with a non-finite gradient."""
        self.readers: defaultdict[int, list[int]] = defaultdict(list)

    def whole(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], region: Region) -> Any:
        return self._note(op, args, kwargs, self._handler.whole(op, args, kwargs, region))

    def part(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], region: Region) -> Any:
        return self._note(op, args, kwargs, self._handler.part(op, args, kwargs, region))

    def _note(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
        if torch._C._current_graph_task_id() != -1:  # in a backward pass, which the hooks observe
            return result
        number = len(self.operations)
        place = written_at(self._outermost)
        name = str(getattr(op, "_opname", None) or getattr(op, "__name__", op))
        self.operations.append((name, (self._modules or [LOSS])[-1], line_of(place.place) if place else ""))
        for x in tensors_in((args, kwargs)):
            if (source := getattr(x, "_made_by", None)) is not None:
                self.readers[source].append(number)
            elif x.requires_grad and x.is_leaf:
                x.register_hook(partial(self._hear, self.weights, number))  # type: ignore[no-untyped-call]
        for x in tensors_in(result):
            if x.is_floating_point():
                if not all_finite(x.detach()):
                    self.forward.append(number)
                if x.requires_grad:
                    x._made_by = number  # type: ignore[attr-defined]
                    x.register_hook(partial(self._hear, self.backward, number))  # type: ignore[no-untyped-call]
        return result

    def _hear(self, numbers: list[int], number: int, gradient: torch.Tensor) -> None:
        with plain_torch():
            finite = all_finite(gradient)
        if not finite:
            numbers.append(number)


def first_to_blame(low: Trail, fp32: Trail) -> tuple[str, str]:
    """The operation to blame, as a phrase, and its module; "" for both if FP32's result is not finite either."""
    stages: tuple[tuple[str, list[int], list[int], Mapping[int, list[int]]], ...] = (
        ("", low.forward, fp32.forward, {}),
        ("the backward pass of ", low.backward, fp32.backward, low.readers),  # computed by the result's reader
        ("the weight's gradient in ", low.weights, fp32.weights, {}),
    )
    for how, broken, expected, readers in stages:
        known = set(expected)
        if (number := next((n for n in broken if n not in known), None)) is not None:
            name, module, line = low.operations[readers.get(number, [number])[-1]]
            place = f"{f' in {module}' if module and module != LOSS else ''}{f' ({line})' if line else ''}"
            return f"{how}{name}{place}", module
    return "", ""
