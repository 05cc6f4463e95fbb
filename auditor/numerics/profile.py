"""A tensor's magnitudes and size, measured once and compared against often: few passes, no copies in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch

from ..records import NodeRange
from .formats import Format
from .metrics import Damage, damage, max_ulp, relative_l2

_MAGNITUDE, _EXPONENT = 0x7FFFFFFF, 0x7F800000
_BIAS, _BEYOND = 127, 255


@dataclass(frozen=True)
class Deviation:
    """How a candidate differs from a reference; the fields are those of NodeError, error its relative L2."""

    error: float
    damage: Damage
    max_ulp: float


class Profile:
    """Magnitudes of a real tensor of shape [*], computed in float32; its entries must not change afterwards."""

    def __init__(self, x: torch.Tensor) -> None:
        self._float = x.detach().float().contiguous()
        self._roundings: dict[str, Deviation] = {}
        bits = self._float.view(torch.int32) & _MAGNITUDE
        counts = torch.bincount((bits.flatten() >> 23), minlength=_BEYOND + 1).tolist() if bits.numel() else [0] * 256
        self.finite = counts[_BEYOND] == 0
        self.range = _range(bits, counts) if self.finite else _finite_range(self._float)
        self.norm = float(torch.linalg.vector_norm(self._float, dtype=torch.float64)) if self.finite else 0.0
        self.nonzero = int(torch.count_nonzero(self._float))

    @property
    def rms(self) -> float:
        """Root mean square; 0 for an empty tensor and for one with non-finite entries."""
        return self.norm / math.sqrt(max(self._float.numel(), 1))

    @cached_property
    def _powers(self) -> torch.Tensor:
        """2 ** floor(log2|x|) of every entry."""
        return (self._float.view(torch.int32) & _EXPONENT).view(torch.float32)

    def rounding(self, fmt: Format) -> Deviation:
        """What rounding every entry to `fmt` does; computed once."""
        if fmt.name not in self._roundings:
            self._roundings[fmt.name], _ = self.deviation(self._float.to(fmt.dtype), fmt)
        return self._roundings[fmt.name]

    def error(self, candidate: torch.Tensor, fmt: Format) -> float:
        """Relative L2 error of `candidate` alone, which costs two passes."""
        _, error = self._gap(candidate)
        return error if error is not None else self._broken(candidate, fmt).error

    def deviation(self, candidate: torch.Tensor, fmt: Format) -> tuple[Deviation, torch.Tensor]:
        """`candidate` (same shape, any real dtype) against the profiled tensor, and candidate - reference in float32.

        In float32 the difference of two close numbers is exact (Sterbenz); norms are accumulated in float64.
        Where either tensor holds a non-finite entry, the slow and complete definitions of metrics.py decide.
        """
        gap, error = self._gap(candidate)
        if error is None:
            return self._broken(candidate, fmt), torch.where(torch.isfinite(gap), gap, torch.zeros_like(gap))
        return Deviation(error, self._shrinkage(candidate, fmt), self._ulps(gap, fmt)), gap

    def _shrinkage(self, candidate: torch.Tensor, fmt: Format) -> Damage:
        """Damage to a tensor that stayed finite, by counting: which entries shrank does not matter, how many does."""
        kept = int(torch.count_nonzero(candidate))
        normal = kept
        if self.nonzero and (kept < self.nonzero or self.range.min_abs < fmt.smallest_normal):
            normal = int(torch.count_nonzero(candidate.abs() >= fmt.smallest_normal))
        total = max(self.nonzero, 1)
        return Damage(0, 0, max(0, self.nonzero - kept) / total, (kept - normal) / total)

    def _gap(self, candidate: torch.Tensor) -> tuple[torch.Tensor, float | None]:
        """candidate - reference, and the relative error if both are finite throughout."""
        gap = candidate.detach() - self._float
        size = float(torch.linalg.vector_norm(gap, dtype=torch.float64))
        if not self.finite or not size < float("inf"):
            return gap, None
        return gap, size / self.norm if self.norm else (0.0 if size == 0 else float("inf"))

    def _ulps(self, gap: torch.Tensor, fmt: Format) -> float:
        if not gap.numel():
            return 0.0
        spacing = self._powers.clamp_min(fmt.smallest_normal) * fmt.epsilon
        return float((gap / spacing).abs_().max())

    def _broken(self, candidate: torch.Tensor, fmt: Format) -> Deviation:
        error = relative_l2(self._float, candidate)
        if not error < float("inf") and not self.finite:  # masks hold infinities on purpose: look beside them
            kept = torch.isfinite(self._float)
            error = relative_l2(self._float[kept], candidate[kept])
        return Deviation(error, damage(self._float, candidate, fmt), max_ulp(self._float, candidate, fmt))


def range_of(x: torch.Tensor) -> NodeRange:
    """Magnitudes of `x` (shape [*], any real dtype). Non-finite entries are left out; empty and all-zero give 0."""
    return Profile(x).range


def _range(bits: torch.Tensor, counts: list[int]) -> NodeRange:
    total = bits.numel()
    if total == 0:
        return NodeRange(0.0, 0.0, 0.0, {})
    largest = _as_float(int(bits.max()))
    if largest == 0:
        return NodeRange(0.0, 0.0, 1.0, {})
    smallest = int(bits.min())
    zeros = 0
    if counts[0]:  # zeros and float32 subnormals share a bin
        zeros = total - int(torch.count_nonzero(bits))
        smallest = int(((bits - 1) & _MAGNITUDE).min()) + 1
    exponents = {index - _BIAS: count for index, count in enumerate(counts[1:_BEYOND], start=1) if count}
    if counts[0] > zeros:
        exponents = {-_BIAS: counts[0] - zeros, **exponents}
    return NodeRange(largest, _as_float(smallest), zeros / total, exponents)


def _finite_range(x: torch.Tensor) -> NodeRange:
    return range_of(x[torch.isfinite(x)])


def _as_float(bits: int) -> float:
    return float(torch.tensor(bits, dtype=torch.int32).view(torch.float32))
