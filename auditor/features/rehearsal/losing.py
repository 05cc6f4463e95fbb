"""Finds the operation of a step at which the error of its loss begins, by the results of all operations in low precision and
in FP32, at the same weights and on the same batch."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import CodeType
from typing import Any

import torch

from ...emulation.emulate import Emulation
from ...emulation.regions import Region
from ...isolation.tensors import plain_torch
from ...numerics.entries import tensors_in
from ...training.blame import NO_PASS, describe_operation
from .result import LossOrigin, RecipeRun
from .sketch import apart, sketch

OFF = 0.25
"""Largest tolerated difference between a recipe's loss and FP32's at the same weights, relative to FP32's loss or, if
larger, to its scatter."""
GROWTH = 4.0
"""An operation whose error is larger than that of its inputs by this factor is the origin."""
SMALL = 8.0
"""An operation whose error is smaller than the loss's by this factor is no origin."""

Key = tuple[str, str, int]
"""(operation with its line, module, how often it has run before)."""


@dataclass
class Results:
    """Sketches of the results of each operation of a step. order: the operations; inputs: the operations that made its
    inputs; of_loss: the operation that made the loss, None if unknown."""

    sketches: dict[Key, list[float]]
    inputs: dict[Key, list[Key]]
    of_loss: Key | None = None


class Sketching(Emulation):
    """Runs a step and sketches the results of its operations outside backward passes. module, outermost: as in `Trail`."""

    def __init__(self, module: Callable[[], str], outermost: CodeType) -> None:
        super().__init__()
        self._module, self._outermost = module, outermost
        self._results = Results({}, {})
        self._count = Counter[tuple[str, str]]()
        self._makers = dict[int, tuple[torch.Tensor, Key]]()  # {id: (tensor, the operation that made it)}

    def run_op(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], region: Region) -> Any:
        if torch._C._current_graph_task_id() != NO_PASS:
            return super().run_op(op, args, kwargs, region)
        made = (self._makers.get(id(x)) for x in tensors_in((args, kwargs)))
        inputs = [one[1] for one in made if one is not None]
        what = describe_operation(op, self._module(), self._outermost)
        result = super().run_op(op, args, kwargs, region)
        with plain_torch():
            self._note(what, inputs, tensors_in(result))
        return result

    def results(self, losses: Iterable[torch.Tensor]) -> Results:
        """The results. losses: tensors that the step returned, or on which it called `backward`."""
        makers = (self._makers.get(id(x)) for x in losses if x.numel() == 1)
        self._results.of_loss = next((one[1] for one in makers if one is not None), None)
        return self._results

    def _note(self, what: tuple[str, str], inputs: list[Key], tensors: list[torch.Tensor]) -> None:
        values = [x for x in tensors if x.is_floating_point() and x.numel()]
        if not values:
            return
        key = *what, self._count[what]
        self._count[what] += 1
        self._results.sketches[key] = [number for x in values for number in sketch(x)]
        self._results.inputs[key] = inputs
        self._makers |= {id(x): (x, key) for x in values}


def off_losses(run: RecipeRun) -> tuple[float, float] | None:
    """The mean loss of a run, and FP32's at the same weights, if they differ too much; over the last third of the sampled
    steps."""
    pairs = _pairs(run)
    known = pairs[-max(len(pairs) // 3, 1) :]
    known = [pair for pair in known if math.isfinite(pair[1]) and math.isfinite(pair[2])]
    if not known:
        return None
    exact = [right for _, _, right in known]
    error = statistics.fmean(abs(low - right) for _, low, right in known)
    if error <= OFF * _size(exact):
        return None
    return statistics.fmean(low for _, low, _ in known), statistics.fmean(exact)


def first_off_step(run: RecipeRun) -> int | None:
    """The first sampled step whose loss differs too much, if that is a problem of the run."""
    pairs = [pair for pair in _pairs(run) if math.isfinite(pair[1]) and math.isfinite(pair[2])]
    if off_losses(run) is None:
        return None
    size = _size([right for _, _, right in pairs])
    return next((step for step, low, right in pairs if abs(low - right) > OFF * size), None)


def _pairs(run: RecipeRun) -> list[tuple[int, float, float]]:
    """(step, the loss, FP32's loss at the same weights) of the sampled steps."""
    return [(i, run.losses[i], x) for i, x in zip(run.steps, run.exact_losses, strict=True) if x is not None]


def _size(exact: list[float]) -> float:
    scatter = statistics.stdev(exact) if len(exact) > 1 else 0.0
    return max(statistics.fmean(map(abs, exact)), scatter)


def find_origin(low: Results, high: Results) -> LossOrigin | None:
    """The operation at which the error of the loss begins: back from the loss, along the largest error, until the inputs'
    error is much smaller."""
    errors = {key: apart(high.sketches[key], one) for key, one in low.sketches.items() if key in high.sketches}
    key = low.of_loss
    if key is None or key not in errors:
        return None
    least = errors[key] / SMALL
    seen = {key}
    while True:
        inputs = [one for one in low.inputs[key] if one in errors and one not in seen]
        worst = max(inputs, key=lambda one: errors[one], default=None)
        before = errors[worst] if worst is not None else 0.0
        if worst is None or before < max(errors[key] / GROWTH, least):
            return LossOrigin(key[0], key[1], before, errors[key])
        key = worst
        seen.add(key)
