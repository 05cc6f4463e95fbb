"""What came of one training step in low precision, and how far its gradients are from FP32's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

Gradients = Mapping[str, torch.Tensor | None]


@dataclass(frozen=True)
class LowStep:
    """One step's results. gradients: {parameter: FP32 gradient, unscaled, None where the loss does not reach it}.

    failure: why the step could not run, with no gradients then.
    """

    loss: float
    gradients: Gradients
    failure: str | None = None

    @property
    def finite(self) -> bool:
        """Whether GradScaler would take the step."""
        return all(bool(torch.isfinite(g).all()) for g in self.gradients.values() if g is not None)


def failed(error: Exception) -> LowStep:
    """A step that raised, with the first line of what it said."""
    lines = str(error).strip().splitlines() or [""]
    return LowStep(float("nan"), {}, lines[0][:200] or type(error).__name__)


def unscaled(gradient: torch.Tensor | None, scale: float) -> torch.Tensor | None:
    """A gradient of the scaled loss as GradScaler hands it to the optimizer, in FP32."""
    return None if gradient is None else gradient.detach().float() / scale


def gradient_error(reference: Gradients, low: Gradients) -> float:
    """Relative L2 error of all parameter gradients together; inf where one is not finite."""
    gap, size = 0.0, 0.0
    for name, ours in reference.items():
        if ours is None:
            continue
        theirs = low.get(name)
        size += float(ours.double().square().sum())
        gap += float((theirs.double() - ours.double()).square().sum()) if theirs is not None else 0.0
    if not gap < float("inf"):
        return float("inf")
    return (gap / size) ** 0.5 if size else 0.0
