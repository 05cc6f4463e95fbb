"""Measures a sampled step: the errors of its gradients, and what rounding discards of its updates."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

from ...numerics.entries import dense
from ...training.replay import gradient_error
from .result import FP32, ROUNDINGS, ParameterSeries, RecipeRun

DECOUPLED = ("Adafactor", "Muon")
"""Optimizers of torch whose weight decay multiplies the weights, although their parameter groups lack the flag
`decoupled_weight_decay`."""
LAST_BIT = 2.0**-23
"""Spacing of FP32 numbers, relative to a power of two."""
STUCK = 0.01
"""Relative distance to the squared gradient below which a second moment need not change."""


@dataclass(frozen=True)
class Update:
    """An optimizer's update of a parameter. gradient: without the loss scale. group: the parameter's group, as a copy.
    weight, second_moment: before the update; the second moment is None if the optimizer has none."""

    gradient: torch.Tensor
    optimizer: Optimizer
    group: Mapping[str, Any]
    weight: torch.Tensor
    second_moment: torch.Tensor | None

    @classmethod
    def begin(cls, optimizer: Optimizer, group: Mapping[str, Any], p: torch.Tensor) -> Update:
        """Save a parameter's values before its update."""
        scale = getattr(optimizer, "grad_scale", None)  # of a fused optimizer, which unscales itself
        assert p.grad is not None
        gradient = dense(p.grad.detach()) / (1.0 if scale is None else scale)
        return cls(gradient, optimizer, {**group}, p.detach().clone(), _second_moment(optimizer, p))


def record_errors(run: RecipeRun, step: int, gradients: Mapping[str, torch.Tensor], fp32: Mapping[str, Any]) -> None:
    """Record the gradient errors of a sampled step, of all parameters together and of each. Errors are undefined if
    FP32's gradients are unknown or zero.

    fp32: {parameter: gradient} of an FP32 step with equal weights; in an FP32 run, of the last sampled step.
    """
    of_two = math.sqrt(2) if run.recipe == FP32 else 1.0  # both batches' gradients scatter
    exact = {name: torch.as_tensor(fp32[name]) for name in gradients if name in fp32}
    run.steps.append(step)
    run.errors.append(_error(exact, gradients, of_two))
    for name in gradients:
        known = {name: exact[name]} if name in exact else {}
        run.parameters[name].error.append(_error(known, gradients, of_two))


def record_rounding(run: RecipeRun, gradients: Mapping[str, torch.Tensor], moved: Mapping[str, Any]) -> None:
    """Record how much of each FP32 gradient of a sampled step is rounding.

    moved: {parameter: gradient} of the same step after all weights have moved by their last bit; empty if unknown.
    """
    for name, gradient in gradients.items():
        known = {name: torch.as_tensor(moved[name])} if name in moved else {}
        run.parameters[name].rounding.append(_error({name: gradient}, known, 1.0) if known else None)


def move_by_last_bit(weights: Iterable[torch.Tensor]) -> None:
    """Multiply each weight in FP32 by 1 + 2**-23 or 1 - 2**-23, at random, in place."""
    draws = torch.Generator().manual_seed(0)  # the step's own random numbers stay those of the other runs
    with torch.no_grad():
        for weight in weights:
            if weight.dtype is torch.float32:
                signs = torch.randint(0, 2, weight.shape, generator=draws) * 2 - 1
                weight.mul_(1 + LAST_BIT * signs)


def _error(exact: Mapping[str, torch.Tensor], gradients: Mapping[str, torch.Tensor], of_two: float) -> float | None:
    if not any(bool(x.any()) for x in exact.values()):
        return None
    return gradient_error(exact, gradients) / of_two


def record_update(series: ParameterSeries, p: torch.Tensor, update: Update, in_fp32: bool) -> None:
    """Record what an update changed, see ParameterSeries. Lost updates are undefined if a remedy updates weights in
    FP32 (`in_fp32`), since the stored weight then does not show single updates."""
    gradient, moment = update.gradient, update.second_moment
    moved = gradient != 0
    series.zero_gradient.append(1 - int(moved.count_nonzero()) / p.numel())
    series.updates_lost.append(None if in_fp32 else _share(p == update.weight, moved))

    now = _second_moment(update.optimizer, p)
    stuck: float | None = None
    if moment is not None and now is not None:
        moving = (gradient.float() ** 2 - moment).abs_() > STUCK * moment.float()
        stuck = _share(now == moment, moving)
    series.second_moment_stuck.append(stuck)
    series.second_moment_zero.append(None if now is None else _share(now == 0, moved))
    series.decay_lost.append(_decay_lost(update, in_fp32))


def _decay_lost(update: Update, in_fp32: bool) -> float | None:
    """The share of the non-zero weights that weight decay does not change; None without decay, and for optimizers
    outside torch, since it is unknown how their decay acts."""
    kind, group = type(update.optimizer), update.group
    decay = float(group.get("weight_decay") or 0.0)
    rate = float(group.get("lr") or 0.0)
    if not (decay and rate and kind.__module__.startswith("torch.optim")):
        return None
    gradient, weight = update.gradient, update.weight
    if in_fp32:
        gradient, weight = gradient.float(), weight.float()
    start, factor = gradient, decay
    if group.get("decoupled_weight_decay", kind.__name__ in DECOUPLED):
        start, factor = weight, -rate * decay
    still = torch.add(start, weight, alpha=factor) == start
    return _share(still, weight != 0)


def in_fp32(run: RecipeRun) -> bool:
    """Whether a remedy of the run's recipe updates the weights in FP32."""
    return not {*run.recipe.remedies}.isdisjoint(ROUNDINGS)


def _second_moment(optimizer: Optimizer, p: torch.Tensor) -> Any:
    """A copy of a parameter's second moment in the optimizer; None if there is none."""
    state = optimizer.state.get(p, {})
    return next((state[name].clone() for name in ("exp_avg_sq", "square_avg") if name in state), None)


def _share(flags: torch.Tensor, among: torch.Tensor) -> float | None:
    """The share of the entries in the mask `among` whose flag is set; None if the mask is empty."""
    whole = int(among.count_nonzero())
    return int((flags & among).count_nonzero()) / whole if whole else None
