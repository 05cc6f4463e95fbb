"""Compares one optimizer update with the update that FP32 would make."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from .result import ParameterSeries, RecipeRun

SECOND_MOMENTS = ("exp_avg_sq", "square_avg")
DECOUPLED = ("Adafactor", "Muon")
"""Optimizers of torch whose weight decay multiplies the weights, although their parameter groups lack the flag for
that."""
STUCK = 0.01
"""Relative distance to the squared gradient below which a second moment need not change."""


class Updates:
    """Compares weights, gradients and second moments before and after an update, and stores the measurements in
    `result`.

    fp32: {parameter: FP32's gradient of the step, flat}; in an FP32 run, that of the previously sampled step.
    """

    def __init__(
        self, result: RecipeRun, parameters: Mapping[str, nn.Parameter], fp32: Mapping[str, torch.Tensor]
    ) -> None:
        self.result, self.parameters, self.fp32 = result, parameters, fp32
        self._is_fp32 = result.recipe.name == "fp32"
        self._before: dict[str, tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]] = {}
        self._sums = [0.0, 0.0]

    def begin(self, optimizer: Optimizer, own: Mapping[str, nn.Parameter]) -> None:
        """Save the values that the optimizer is about to change."""
        for name, p in own.items():
            if p.grad is not None:
                moment = _second_moment(optimizer, p)
                kept = None if moment is None else moment.clone()
                self._before[name] = p.detach().clone(), p.grad.detach().clone(), kept

    def end(self, step: int, optimizer: Optimizer) -> None:
        """Measure the update of each parameter; only the first update per step counts."""
        if not self._before:
            return
        wide = bool({*self.result.recipe.remedies} - {"fp32_accumulation"})
        if step not in self.result.steps:
            self.result.steps.append(step)
            self.result.errors.append(None)
            self.result.noise.append(None)
            self._sums = [0.0, 0.0]
        for group in optimizer.param_groups:
            for name in [n for n in self._before if any(self.parameters[n] is p for p in group["params"])]:
                p, (before, grad, moment) = self.parameters[name], self._before.pop(name)
                row, moved = self.result.parameters[name], grad != 0
                row.zero_gradient.append(_share(~moved))
                row.unchanged.append(None if wide else _share((p == before)[moved]))
                row.decay_lost.append(_decay_lost(before.float() if wide else before, grad, group, type(optimizer)))
                now, stuck = _second_moment(optimizer, p), None
                if moment is not None and now is not None:
                    moving = (grad.float() ** 2 - moment.float()).abs() > STUCK * moment.float()
                    stuck = _share((now == moment)[moving])
                row.second_moment_stuck.append(stuck)
                row.second_moment_zero.append(_share((now == 0)[moved]) if now is not None else None)
                self._hold_against(name, row, grad.float())
        whole, apart = self._sums
        figure = math.sqrt(apart / whole) if whole else None
        (self.result.noise if self._is_fp32 else self.result.errors)[-1] = figure

    def _hold_against(self, name: str, row: ParameterSeries, gradient: torch.Tensor) -> None:
        """Compare the gradient with FP32's at the same weights; in an FP32 run, with that of the previously sampled
        step."""
        other, error = self.fp32[name].view_as(gradient), None
        if not (self._is_fp32 and len(self.result.steps) == 1) and bool(other.isfinite().all()):
            size = float(other.square().sum())
            apart = float((gradient - other).square().sum()) / (2.0 if self._is_fp32 else 1.0)
            self._sums = [self._sums[0] + size, self._sums[1] + apart]
            error = math.sqrt(apart / size) if size else None
        (row.noise if self._is_fp32 else row.error).append(error)
        if self._is_fp32:
            other.copy_(gradient)


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
