"""The loss scales that FP16 gradients can live with, and the updates that weights stored in BF16 lose."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

import torch

from ..execution.policy import Policy
from ..execution.step import LowStep, Step, hear_gradients
from ..numerics.formats import FORMATS, is_low
from ..numerics.histogram import (
    exponent_counts,
    flushed,
    largest_scale,
    magnitudes_of,
    merge_magnitudes,
    significant,
    significant_entries,
    subnormal,
)
from ..records import Magnitudes
from ..records.training import LossScale, ParameterGradients, StepTrial
from .own import Lowering, own_step

ALLOWED = 0.01
"""Share of the non-zero low gradients that may be flushed to zero."""

HEADROOM = 16.0
"""The scale to start with leaves room for gradients to grow by this factor, where the window is as wide."""

_HIGHEST = 126
FP16 = FORMATS["fp16"]

RATES = (1e-1, 1e-2, 1e-3, 1e-4, 1e-5)
"""Learning rates that the outlook lists."""

_HALF_SPACING = FORMATS["bf16"].mantissa + 1
_NEVER = 200
"""Ratio given to weights that are zero: next to zero BF16 has room for any update."""


def loss_scale(low: Mapping[str, Magnitudes], allowed: float = ALLOWED) -> LossScale | None:
    """The window for gradients that are low, by module; None where none is, or all are zero."""
    pool = merge_magnitudes(low.values())
    if not pool.nonzero:
        return None
    top = min(math.floor(math.log2(largest_scale(pool, FP16))), _HIGHEST)
    needed = next(k for k in range(min(0, top), _HIGHEST + 400) if flushed(pool.exponents, FP16, k) <= allowed)
    largest = max(low, key=lambda module: low[module].max_abs)
    hungry = max(low, key=lambda module: _lost(low[module], top))
    open_ = needed <= top
    shifts = range(min(0, needed, top) - 4, max(needed, top) + 5)
    return LossScale(
        minimum=math.ldexp(1.0, needed),
        maximum=math.ldexp(1.0, top),
        init=max(math.ldexp(1.0, needed), math.ldexp(1.0, top) / HEADROOM) if open_ else None,
        flushed_unscaled=flushed(pool.exponents, FP16),
        allowed=allowed,
        closed_by=None if open_ else largest,
        largest=largest,
        starved=hungry if _lost(low[hungry], top) else None,
        flushed={k: flushed(pool.exponents, FP16, k) for k in shifts},
        subnormal={k: subnormal(pool.exponents, FP16, k) for k in shifts},
    )


def _lost(found: Magnitudes, shift: int) -> int:
    """How many gradients of a module are flushed at the top of the window."""
    return round(flushed(found.exponents, FP16, shift) * found.nonzero)


def scaler_code(init: float) -> str:
    """The GradScaler to start with, as code; everything but the scale is torch's default, spelt out."""
    return f"GradScaler(init_scale={init:.10g}, growth_factor=2, backoff_factor=0.5, growth_interval=2000)"


def ratios_of(weight: torch.Tensor, gradient: torch.Tensor) -> dict[int, int]:
    """{floor(log2(|g| / half the BF16 spacing at w)): count}, over the entries whose gradient is not zero."""
    w, g = weight.detach().float().reshape(-1), gradient.detach().float().reshape(-1)
    moved = torch.isfinite(g) & (g != 0)
    w, g = w[moved], g[moved]
    still = w == 0
    spacing = torch.ldexp(torch.ones_like(w), torch.frexp(w).exponent - 1 - _HALF_SPACING)
    counts = exponent_counts((g.abs() / spacing)[~still]) if bool((~still).any()) else {}
    return counts if not bool(still.any()) else {**counts, _NEVER: int(still.sum())}


def lost_by_sgd(parameters: Iterable[ParameterGradients], rate: float) -> float:
    """Share of the non-zero updates `rate * gradient` that rounding to BF16 takes back.

    Within the power of two that the edge falls in, magnitudes are taken to be spread evenly on the logarithmic scale.
    """
    edge = -math.log2(rate)
    lost, total = 0.0, 0
    for parameter in parameters:
        for ratio, count in parameter.ratios.items():
            lost += count * min(max(edge - ratio, 0.0), 1.0)
            total += count
    return lost / total if total else 0.0


def lost_by_adam(parameters: Iterable[ParameterGradients], rate: float) -> float:
    """The same for Adam's first steps, which move every weight that has a gradient by the learning rate.

    Shares are of all weights: it takes those without a gradient to be spread as the others are.
    """
    edge = math.log2(rate) + _HALF_SPACING
    lost, total = 0, 0
    for parameter in parameters:
        lost += sum(n for e, n in parameter.weight.exponents.items() if e > edge)
        total += parameter.weight.nonzero + parameter.weight.zeros
    return lost / total if total else 0.0


def trials_of(
    step: Step, low: Lowering, window: LossScale, cast: Collection[str] = frozenset()
) -> tuple[StepTrial, ...]:
    """One step without scaling, one at the recommended scale (or the largest), one at twice the largest.

    cast: names of the weights whose gradients are low on their way.
    """
    scales = (1.0, window.init or window.maximum, 2 * window.maximum)
    return tuple(trial(step, low, scale, window, cast) for scale in dict.fromkeys(scales))


@dataclass
class _LowGradients:
    """What came of the low gradients of one step. reference: what they are in FP32; broken: modules with one that is not
    finite; largest: of those that FP32 has above all others, its own magnitude and what it is in this step, unscaled."""

    scale: float
    lost: int = 0
    all: int = 0
    reference: list[Magnitudes] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    largest: tuple[float, float] = (0.0, 0.0)

    def hear(self, module: str, ours: torch.Tensor, gradient: torch.Tensor) -> None:
        """One gradient in FP16, still scaled, beside FP32's."""
        kept = significant_entries(ours)
        self.lost += int((kept & (gradient == 0)).sum())
        self.all += int(kept.sum())
        self.reference.append(significant(magnitudes_of(ours)))
        if not bool(torch.isfinite(gradient).all()):
            self.broken.append(module)
        self.compare(ours, gradient.float() / self.scale)

    def compare(self, ours: torch.Tensor, gradient: torch.Tensor) -> None:
        """FP32's gradient and the step's, unscaled: the largest are kept."""
        if ours.numel() and float(ours.abs().max()) > self.largest[0]:
            at = ours.abs().argmax()
            self.largest = float(ours.flatten()[at].abs()), float(gradient.flatten()[at].abs())


def trial(
    step: Step, lowering: Lowering, scale: float, window: LossScale, cast: Collection[str] = frozenset()
) -> StepTrial:
    """One FP16 step at a loss scale: what became of every gradient that FP16 holds."""
    seen = _LowGradients(scale)

    def watch(name: str, index: int, gradient: torch.Tensor) -> None:
        if not is_low(gradient.dtype):
            return
        reference = step.gradients.get(name, [])
        ours = reference[index] if index < len(reference) else None
        if ours is not None and ours.shape == gradient.shape:
            seen.hear(step.capture.nodes[name].owner, ours, gradient)

    low = own_step(step, lowering, scale)
    hear_gradients(step, Policy(step.capture, "autocast", lowering.precision, lowering.format), scale, watch)
    for name in cast:
        result = low.gradients.get(name)
        if result is not None:
            seen.compare(step.by_parameter[name], result)
    shift = round(torch.log2(torch.tensor(scale, dtype=torch.float64)).item())
    pool = merge_magnitudes(seen.reference)
    overflow, beyond = low.failure is not None or not low.finite, scale > window.maximum
    return StepTrial(
        scale=scale,
        flushed=seen.lost / seen.all if seen.all else 0.0,
        predicted=flushed(pool.exponents, FORMATS["fp16"], shift),
        overflow=overflow,
        predicted_overflow=beyond,
        explained=None if overflow == beyond else _why(seen, low, window, overflow),
    )


def _why(seen: _LowGradients, low: LowStep, window: LossScale, overflow: bool) -> str:
    """What lies between the prediction, of FP32's gradients over all batches, and the step on the first batch."""
    ours, theirs = seen.largest
    if overflow:
        if low.failure is not None:
            return f"the step raised: {low.failure}"
        if not math.isfinite(low.loss):
            return "the loss itself is not finite in this step"
        where = _places(seen.broken) or "the weights"
        return f"gradients of {where} overflow, though FP32's largest, scaled, is {ours * seen.scale:.3g}"
    if seen.broken:
        return f"gradients of {_places(seen.broken)} overflow, and none of them reaches a weight"
    if ours * seen.scale <= FORMATS["fp16"].largest:
        return (
            f"the window is that of all batches; in the first one, which is run here, the largest gradient, scaled, is "
            f"{ours * seen.scale:.3g}"
        )
    return f"FP32's largest gradient is {ours:.3g}, and {theirs:.3g} in this step"


def _places(modules: list[str]) -> str:
    return ", ".join(module or "the model" for module in list(dict.fromkeys(modules))[:3])
