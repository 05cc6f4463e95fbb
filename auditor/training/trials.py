"""FP16 steps run for real, at loss scales inside and outside of the window, against what the histograms predict."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, field

import torch

from ..execution.step import LowStep, Step
from ..numerics.formats import FORMATS
from ..numerics.histogram import flushed, magnitudes_of, merged, significant, significant_entries
from ..records import Magnitudes
from ..records.training import LossScale, Trial
from .own import Lowering, own_step


def trials_of(step: Step, low: Lowering, window: LossScale, cast: Collection[str] = frozenset()) -> tuple[Trial, ...]:
    """One step without scaling, one at the recommended scale (or the largest), one at twice the largest.

    cast: names of the weights whose gradients are low on their way.
    """
    scales = (1.0, window.init or window.maximum, 2 * window.maximum)
    return tuple(trial(step, low, scale, window, cast) for scale in dict.fromkeys(scales))


@dataclass
class _Seen:
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
) -> Trial:
    """One FP16 step at a loss scale: what became of every gradient that FP16 holds."""
    seen = _Seen(scale)

    def watch(name: str, index: int, gradient: torch.Tensor) -> None:
        reference = step.gradients.get(name, [])
        ours = reference[index] if index < len(reference) else None
        if ours is not None and ours.shape == gradient.shape:
            seen.hear(step.capture.nodes[name].owner, ours, gradient)

    low = own_step(step, lowering, scale, watch)
    for name in cast:
        found = low.gradients.get(name)
        if found is not None:
            seen.compare(step.by_parameter[name], found)
    shift = round(torch.log2(torch.tensor(scale, dtype=torch.float64)).item())
    pool = merged(seen.reference)
    overflow, beyond = low.failure is not None or not low.finite, scale > window.maximum
    return Trial(
        scale=scale,
        flushed=seen.lost / seen.all if seen.all else 0.0,
        predicted=flushed(pool.exponents, FORMATS["fp16"], shift),
        overflow=overflow,
        predicted_overflow=beyond,
        explained=None if overflow == beyond else _why(seen, low, window, overflow),
    )


def _why(seen: _Seen, low: LowStep, window: LossScale, overflow: bool) -> str:
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
