"""FP16 steps run for real, at loss scales inside and outside of the window, against what the histograms predict."""

from __future__ import annotations

from collections import Counter

import torch

from ..numerics.formats import FORMATS
from .emulate import Emulator, Precision, low_step
from .gradients import Step
from .records import LossScale, Trial
from .spreads import flushed, merged, significant, significant_entries, spread_of


def trials_of(step: Step, precision_of: Precision, window: LossScale) -> tuple[Trial, ...]:
    """One step without scaling, one at the recommended scale (or the largest), one at twice the largest."""
    scales = (1.0, window.init or window.maximum, 2 * window.maximum)
    return tuple(trial(step, precision_of, scale, window) for scale in dict.fromkeys(scales))


def trial(step: Step, precision_of: Precision, scale: float, window: LossScale) -> Trial:
    """One FP16 step at a loss scale: what became of every gradient that FP16 holds."""
    emulator = Emulator(step.capture, "autocast", "fp16", precision_of)
    counted: Counter[str] = Counter()
    seen = []

    def watch(name: str, index: int, gradient: torch.Tensor) -> None:
        reference = step.gradients.get(name, [])
        ours = reference[index] if index < len(reference) else None
        if ours is not None and ours.shape == gradient.shape:
            kept = significant_entries(ours)
            counted["lost"] += int((kept & (gradient == 0)).sum())
            counted["all"] += int(kept.sum())
            seen.append(significant(spread_of(ours)))

    emulator.watch = watch
    low = low_step(emulator, step.flat, step.parameters, scale, step.seed)
    shift = round(torch.log2(torch.tensor(scale, dtype=torch.float64)).item())
    pool = merged(seen)
    return Trial(
        scale=scale,
        flushed=counted["lost"] / counted["all"] if counted["all"] else 0.0,
        predicted=flushed(pool.exponents, FORMATS["fp16"], shift),
        overflow=low.failure is not None or not low.finite,
        predicted_overflow=scale > window.maximum,
    )
