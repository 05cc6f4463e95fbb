"""FP16 steps run for real, at loss scales inside and outside of the window, against what the histograms predict."""

from __future__ import annotations

from collections import Counter

import torch

from ..formats.histogram import flushed, magnitudes_of, merged, significant, significant_entries
from ..formats.table import FORMATS
from ..records.training import LossScale, Trial
from ..replay.step import Step
from .own import Lowering, own_step


def trials_of(step: Step, low: Lowering, window: LossScale) -> tuple[Trial, ...]:
    """One step without scaling, one at the recommended scale (or the largest), one at twice the largest."""
    scales = (1.0, window.init or window.maximum, 2 * window.maximum)
    return tuple(trial(step, low, scale, window) for scale in dict.fromkeys(scales))


def trial(step: Step, lowering: Lowering, scale: float, window: LossScale) -> Trial:
    """One FP16 step at a loss scale: what became of every gradient that FP16 holds."""
    counted: Counter[str] = Counter()
    seen = []

    def watch(name: str, index: int, gradient: torch.Tensor) -> None:
        reference = step.gradients.get(name, [])
        ours = reference[index] if index < len(reference) else None
        if ours is not None and ours.shape == gradient.shape:
            kept = significant_entries(ours)
            counted["lost"] += int((kept & (gradient == 0)).sum())
            counted["all"] += int(kept.sum())
            seen.append(significant(magnitudes_of(ours)))

    low = own_step(step, lowering, scale, watch)
    shift = round(torch.log2(torch.tensor(scale, dtype=torch.float64)).item())
    pool = merged(seen)
    return Trial(
        scale=scale,
        flushed=counted["lost"] / counted["all"] if counted["all"] else 0.0,
        predicted=flushed(pool.exponents, FORMATS["fp16"], shift),
        overflow=low.failure is not None or not low.finite,
        predicted_overflow=scale > window.maximum,
    )
