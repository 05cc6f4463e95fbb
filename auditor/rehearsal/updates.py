"""Measures lost parts of optimizer updates, and compares gradients with FP32's."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ..isolation.tensors import plain_torch
from ..numerics.entries import dense
from .result import RecipeRun

SECOND_MOMENTS = ("exp_avg_sq", "square_avg")
DECOUPLED = ("Adafactor", "Muon")
"""Optimizers of torch whose weight decay multiplies the weights, although their parameter groups lack the flag
`decoupled_weight_decay`."""
STUCK = 0.01
"""Relative distance to the squared gradient below which a second moment need not change."""


Gradients = dict[str, Any]
"""{name of a parameter: its gradient in FP32, flat, as a tensor or an array}."""


class Updates:
    """Measures the first update of every parameter in one step. fp32: FP32's gradients of this step, as far as known; in
    an FP32 run, those of the last sampled step. gradients: the step's own."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], result: RecipeRun, fp32: Gradients) -> None:
        self.gradients = Gradients()
        self._result, self._fp32 = result, fp32
        self._names = {p: name for name, p in parameters.items()}
        self._squares: list[tuple[float, float]] = []

    @contextmanager
    def measure(self, optimizer: Optimizer, group: Mapping[str, Any], p: nn.Parameter) -> Iterator[None]:
        """Compare a parameter's gradient with FP32's, and the parameter before and after the `with` block, in which the
        optimizer updates it."""
        name, grad = self._names.pop(p, None), dense(p.grad.detach())  # type: ignore[union-attr]
        if name is None:
            yield
            return
        own = self.gradients[name] = grad.to(torch.float32, copy=True).flatten()
        row, recipe = self._result.parameters[name], self._result.recipe
        fp32 = torch.as_tensor(self._fp32.get(name, own * math.nan))
        error = own - fp32
        square, apart = float(fp32.dot(fp32)), float(error.dot(error)) / (2 if recipe.format == "fp32" else 1)
        self._squares.append((square, apart) if math.isfinite(square) else (0.0, 0.0))
        row.error.append(_relative(*self._squares[-1:]))
        wide = bool({*recipe.remedies} - {"fp32_accumulation"})
        before, moved, moment, moving = p.detach().clone(), grad != 0, _second_moment(optimizer, p), grad
        row.zero_gradient.append(1 - int(moved.count_nonzero()) / p.numel())
        row.decay_lost.append(_decay_lost(before.float() if wide else before, grad, group, type(optimizer)))
        if moment is not None:
            moment, moving = moment.clone(), (grad.float() ** 2 - moment).abs_() > STUCK * moment.float()
        yield
        with plain_torch():
            now = _second_moment(optimizer, p)
            row.updates_lost.append(None if wide else _share(p == before, moved))
            row.second_moment_stuck.append(None if moment is None or now is None else _share(now == moment, moving))
            row.second_moment_zero.append(None if now is None else _share(now == 0, moved))

    def finish(self, step: int) -> Gradients:
        """Record the error of all gradients of the step together, unless its gradients were not finite. Returns the last
        known gradient of every parameter."""
        if self._squares:
            self._result.steps.append(step)
            self._result.errors.append(_relative(*self._squares))
        return self._fp32 | self.gradients


def _relative(*squares: tuple[float, float]) -> float | None:
    """The relative L2 error of parts with (squared norm, squared error); None if the norm is zero or unknown."""
    size, apart = map(sum, zip(*squares, strict=True))
    return math.sqrt(apart / size) if size else None


def _second_moment(optimizer: Optimizer, p: nn.Parameter) -> torch.Tensor | None:
    return next((v for k, v in optimizer.state.get(p, {}).items() if k in SECOND_MOMENTS), None)


def _share(flags: torch.Tensor, among: torch.Tensor) -> float | None:
    """The share of the entries in the mask `among` whose flag is set; None if the mask is empty."""
    whole = int(among.count_nonzero())
    return int((flags & among).count_nonzero()) / whole if whole else None


def _decay_lost(
    before: torch.Tensor, grad: torch.Tensor, group: Mapping[str, Any], kind: type[Optimizer]
) -> float | None:
    """Share of the weights that weight decay does not change. None without decay, or for optimizers outside torch,
    whose decay is unknown."""
    decay, rate = float(group.get("weight_decay") or 0.0), float(group.get("lr", 0.0))
    if not decay or not rate or not kind.__module__.startswith("torch.optim"):
        return None
    if group.get("decoupled_weight_decay", kind.__name__ in DECOUPLED):
        return _share(before * (1 - rate * decay) == before, before != 0)
    return _share(grad + decay * before.to(grad.dtype) == grad, before != 0)
