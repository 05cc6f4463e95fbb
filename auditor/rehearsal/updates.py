"""Measures lost parts of optimizer updates, and compares gradients with FP32's."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ..numerics.entries import all_finite, dense
from .result import FP32, RecipeRun

SECOND_MOMENTS = ("exp_avg_sq", "square_avg")
DECOUPLED = ("Adafactor", "Muon")
"""Optimizers of torch whose weight decay multiplies the weights, although their parameter groups lack the flag
`decoupled_weight_decay`."""
STUCK = 0.01
"""Relative distance to the squared gradient below which a second moment need not change."""


class Updates:
    """Measures the first update of every parameter in one step, and adds the values to `result`, if given."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], result: RecipeRun | None) -> None:
        self.result = result
        self.gradients: dict[str, torch.Tensor] = {}
        self._names = {id(p): name for name, p in parameters.items()}
        self._before: list[tuple[str, nn.Parameter, Mapping[str, Any], torch.Tensor, torch.Tensor | None]] = []

    def begin(self, optimizer: Optimizer) -> None:
        """Save the values that the optimizer is about to change."""
        for group in optimizer.param_groups:
            for p in group["params"]:
                name = self._names.get(id(p))
                if p.grad is None or name is None or name in self.gradients:
                    continue
                self.gradients[name], moment = dense(p.grad.detach()).clone(), _second_moment(optimizer, p)
                if self.result is not None:
                    kept = None if moment is None else moment.clone()
                    self._before.append((name, p, group, p.detach().clone(), kept))

    def end(self, optimizer: Optimizer) -> None:
        """Measure the update of each parameter."""
        for name, p, group, before, moment in self._before:
            assert self.result is not None
            row, grad = self.result.parameters[name], self.gradients[name]
            wide = bool({*self.result.recipe.remedies} - {"fp32_accumulation"})
            moved, now = grad != 0, _second_moment(optimizer, p)
            row.zero_gradient.append(_share(~moved))
            row.updates_lost.append(None if wide else _share((p == before)[moved]))
            row.decay_lost.append(_decay_lost(before.float() if wide else before, grad, group, type(optimizer)))
            stuck = None
            if moment is not None and now is not None:
                moving = (grad.float() ** 2 - moment.float()).abs() > STUCK * moment.float()
                stuck = _share((now == moment)[moving])
            row.second_moment_stuck.append(stuck)
            row.second_moment_zero.append(_share((now == 0)[moved]) if now is not None else None)
        self._before.clear()

    def compare(self, step: int, others: Mapping[str, torch.Tensor]) -> None:
        """Compare the gradients with FP32's of the same step; in an FP32 run, with the last sampled step's."""
        if self.result is None or not self.gradients:
            return
        halved = 2.0 if self.result.recipe == FP32 else 1.0
        size = apart = 0.0
        for name, gradient in self.gradients.items():
            error, other = None, others.get(name)
            if other is not None and all_finite(other):
                own = float(other.square().sum()), float((gradient.float() - other).square().sum()) / halved
                size, apart = size + own[0], apart + own[1]
                error = math.sqrt(own[1] / own[0]) if own[0] else None
            self.result.parameters[name].error.append(error)
        self.result.steps.append(step)
        self.result.errors.append(math.sqrt(apart / size) if size else None)


def _second_moment(optimizer: Optimizer, p: nn.Parameter) -> torch.Tensor | None:
    return next((v for k, v in optimizer.state.get(p, {}).items() if k in SECOND_MOMENTS), None)


def _share(flags: torch.Tensor) -> float | None:
    return float(flags.float().mean()) if flags.numel() else None


def _decay_lost(
    before: torch.Tensor, grad: torch.Tensor, group: Mapping[str, Any], kind: type[Optimizer]
) -> float | None:
    """Share of the weights that weight decay does not change. None without decay, or for optimizers outside torch,
    whose decay is unknown."""
    decay, rate = float(group.get("weight_decay") or 0.0), float(group.get("lr", 0.0))
    held = before != 0
    if not decay or not rate or not kind.__module__.startswith("torch.optim"):
        return None
    if group.get("decoupled_weight_decay", kind.__name__ in DECOUPLED):
        return _share((before * (1 - rate * decay) == before)[held])
    return _share((grad + decay * before.to(grad.dtype) == grad)[held])
