"""A tensor's magnitudes, measured once, and how others differ from it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from .carried import in_format
from .formats import Format
from .histogram import histogram_of
from .metrics import Damage, damage, max_ulp, relative_l2


@dataclass(frozen=True)
class Deviation:
    """How a candidate differs from a reference; the fields are those of NodeError, error its relative L2."""

    error: float
    damage: Damage
    max_ulp: float


class Profile:
    """A real tensor of shape [*], in float32; its entries must not change afterwards."""

    def __init__(self, x: torch.Tensor) -> None:
        self._float = x.detach().float()
        self._roundings: dict[str, Deviation] = {}
        self.range = histogram_of(self._float)

    @property
    def rms(self) -> float:
        """Root mean square; 0 for an empty tensor and for one with non-finite entries."""
        return 0.0 if self.range.nonfinite else self.range.norm / math.sqrt(max(self._float.numel(), 1))

    def rounding(self, fmt: Format) -> Deviation:
        """What rounding every entry to `fmt` does; computed once."""
        if fmt.name not in self._roundings:
            self._roundings[fmt.name] = self.deviation(in_format(self._float, fmt), fmt)
        return self._roundings[fmt.name]

    def error(self, candidate: torch.Tensor) -> float:
        """Relative L2 error of a candidate; of its finite entries, where the tensor has infinities that it lost."""
        error = relative_l2(self._float, candidate)
        if error < math.inf or not self.range.nonfinite:
            return error
        kept = torch.isfinite(self._float)  # masks hold infinities on purpose: look beside them
        return relative_l2(self._float[kept], candidate[kept])

    def deviation(self, candidate: torch.Tensor, fmt: Format) -> Deviation:
        """How `candidate` (same shape, any real dtype) differs from the tensor."""
        lost, ulps = damage(self._float, candidate, fmt), max_ulp(self._float, candidate, fmt)
        return Deviation(self.error(candidate), lost, ulps)
