"""A tensor's magnitudes and size, measured once and compared against often: few passes, no copies in float64."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from ..records import Magnitudes
from ..sparing import now
from .metrics import Damage, damage, max_ulp, relative_l2
from .rounding import round_to
from .table import Format, is_low

_MAGNITUDE, _EXPONENT = 0x7FFFFFFF, 0x7F800000
_MAGNITUDE_16 = 0x7FFF
_BIAS, _BEYOND, _BYTES = 127, 255, 256
_CHUNK, _COUNTED = 1 << 17, 1 << 18
_LARGE, _SMALL = 1e15, 1e-15


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
        spans = [_Span(chunk) for (chunk,) in _chunks(self._float, step=_COUNTED)]
        counts = [sum(bins) for bins in zip(*(span.counts for span in spans), strict=True)]
        self.finite = counts[_BEYOND] == 0
        self.norm = math.hypot(*(norm for span in spans for norm in span.norms)) if self.finite else 0.0
        self.range = _range(spans, counts, self.norm) if self.finite else _finite_range(self._float)
        self.nonzero = self.range.nonzero

    @property
    def rms(self) -> float:
        """Root mean square; 0 for an empty tensor and for one with non-finite entries."""
        return self.norm / math.sqrt(max(self._float.numel(), 1))

    def rounding(self, fmt: Format) -> Deviation:
        """What rounding every entry to `fmt` does; computed once."""
        if fmt.name not in self._roundings:
            self._roundings[fmt.name], _ = self.deviation(self._rounded(fmt), fmt, keep=False, most=0.5)
        return self._roundings[fmt.name]

    def _rounded(self, fmt: Format) -> torch.Tensor:
        return self._float.to(fmt.dtype) if fmt.native else round_to(self._float, fmt.name)

    def error(self, candidate: torch.Tensor, fmt: Format) -> float:
        """Relative L2 error of `candidate` alone."""
        size = math.hypot(*(_norm(_gap(c, r)) for r, c in _chunks(self._float, candidate))) if self.finite else math.nan
        return self._error(size, candidate, fmt)

    def deviation(
        self, candidate: torch.Tensor, fmt: Format, *, keep: bool = True, most: float = math.inf
    ) -> tuple[Deviation, torch.Tensor | None]:
        """`candidate` (same shape, any real dtype) against the profiled tensor, and candidate - reference in bfloat16.

        keep: whether that difference is wanted. most: units of the last place that no finite entry can be off by more.
        In float32 the difference of two close numbers is exact (Sterbenz).
        Where either tensor holds a non-finite entry, the slow and complete definitions of metrics.py decide.
        """
        found, gaps, _ = self._compared(candidate, None, fmt, keep, most)
        return found, gaps

    def deviation_and_error(
        self, candidate: torch.Tensor, other: torch.Tensor, fmt: Format, *, keep: bool
    ) -> tuple[Deviation, torch.Tensor | None, float]:
        """`deviation` of one candidate and `error` of another, while the profiled entries are in the cache."""
        found, gaps, size = self._compared(candidate, other, fmt, keep, math.inf)
        return found, gaps, self._error(size, other, fmt)

    def _compared(
        self, candidate: torch.Tensor, other: torch.Tensor | None, fmt: Format, keep: bool, most: float
    ) -> tuple[Deviation, torch.Tensor | None, float]:
        """See `deviation`; and the L2 norm of other - reference."""
        gaps = torch.empty_like(self._float, dtype=torch.bfloat16) if keep else None
        clamped = self.range.min_abs < fmt.smallest_normal or self.range.zeros > 0
        size, ulps, sizes = 0.0, 0.0, []
        unwanted = self._float  # in the place of what is not there
        filled = gaps if gaps is not None else unwanted
        for r, c, kept, beside in _chunks(self._float, candidate, filled, unwanted if other is None else other):
            if other is not None:
                sizes.append(_norm(_gap(beside, r)))
            gap = _gap(c, r)
            size = math.hypot(size, _norm(gap))
            if gaps is not None:
                kept.copy_(gap)
            if ulps != most:
                ulps = max(ulps, _steps(gap, r, fmt, clamped))
        return *self._judged(candidate, fmt, gaps, size, ulps), math.hypot(*sizes)

    def _judged(
        self, candidate: torch.Tensor, fmt: Format, gaps: torch.Tensor | None, size: float, ulps: float
    ) -> tuple[Deviation, torch.Tensor | None]:
        if not self.finite or not size < math.inf:
            return self._broken(candidate, fmt), gaps.nan_to_num_(0.0, 0.0, 0.0) if gaps is not None else None
        if gaps is not None and size > _LARGE:
            gaps.nan_to_num_()  # rounding to bfloat16 may have left its range
        return Deviation(self._relative(size), self._shrinkage(candidate, ulps, fmt), ulps), gaps

    def _error(self, size: float, candidate: torch.Tensor, fmt: Format) -> float:
        return self._relative(size) if self.finite and size < math.inf else self._broken(candidate, fmt).error

    def _relative(self, size: float) -> float:
        return size / self.norm if self.norm else _of_zeros(size)

    def _shrinkage(self, candidate: torch.Tensor, ulps: float, fmt: Format) -> Damage:
        """Damage to a tensor that stayed finite, by counting: which entries shrank does not matter, how many does."""
        if not self.nonzero or (self.range.min_abs >= 2 * fmt.smallest_normal and ulps * fmt.epsilon < 0.5):
            return Damage(0, 0, 0.0, 0.0)  # every entry is still more than half of what it was
        kept = normal = 0
        for (c,) in _chunks(candidate):
            kept += _nonzero(c)
            normal += _normal(c, fmt)
        return Damage(0, 0, max(0, self.nonzero - kept) / self.nonzero, (kept - normal) / self.nonzero)

    def _broken(self, candidate: torch.Tensor, fmt: Format) -> Deviation:
        error = relative_l2(self._float, candidate)
        if not error < float("inf") and not self.finite:  # masks hold infinities on purpose: look beside them
            kept = torch.isfinite(self._float)
            error = relative_l2(self._float[kept], candidate[kept])
        return Deviation(error, damage(self._float, candidate, fmt), max_ulp(self._float, candidate, fmt))


def _of_zeros(size: float) -> float:
    """The relative error of a tensor that is to be all zeros."""
    return 0.0 if size == 0 else math.inf


class _Span:
    """Bits of the magnitudes in one chunk: how many have each exponent, the largest, and the smallest that is not 0; norms of its parts."""

    def __init__(self, x: torch.Tensor) -> None:
        self.norms = [_norm(part) for part in torch.split(x, _CHUNK)]
        bits = x.view(torch.int32) & _MAGNITUDE
        self.counts = _counts((bits >> 23).to(torch.uint8))
        self.zeros, self.largest, self.smallest = 0, 0, _MAGNITUDE
        if not bits.numel():
            return
        self.smallest, self.largest = (int(end) for end in torch.aminmax(bits))
        if self.smallest == 0:
            self.smallest = int(bits.sub_(1).bitwise_and_(_MAGNITUDE).min()) + 1
            # Zeros and float32 subnormals share a bin; where there are both, zeros are what is now the largest number.
            subnormal = self.smallest >> 23 == 0
            self.zeros = int(torch.count_nonzero(bits == _MAGNITUDE)) if subnormal else self.counts[0]


def _counts(x: torch.Tensor) -> list[int]:
    """How often each byte occurs. Where there are many, pairs are counted: half as many, but 65,536 counts to add up."""
    paired = x.numel() // 2 * 2
    if x.numel() < _COUNTED // 2 or x.device.type != "cpu":
        return torch.bincount(x, minlength=_BYTES).tolist()
    pairs = torch.bincount(x[:paired].view(torch.uint16).int(), minlength=_BYTES**2).view(_BYTES, _BYTES)
    counts = pairs.sum(0) + pairs.sum(1) + torch.bincount(x[paired:], minlength=_BYTES)
    return counts.tolist()


def _chunks(*tensors: torch.Tensor, step: int = _CHUNK) -> Iterator[tuple[torch.Tensor, ...]]:
    """Runs of neighbours that fit a processor's cache, on a GPU longer ones; one empty run if the tensor is empty."""
    flat = [x.detach().reshape(-1) for x in tensors]
    length = flat[0].numel()
    step = step if flat[0].device.type == "cpu" else now().run
    for start in range(0, max(length, 1), step):
        yield tuple(x[start : start + step] for x in flat)


def _gap(candidate: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    return candidate.float().sub_(reference) if is_low(candidate.dtype) else candidate - reference


def _steps(gap: torch.Tensor, reference: torch.Tensor, fmt: Format, clamped: bool) -> float:
    """Largest |gap| in units of the format's spacing at the reference; the gap is used up."""
    if not gap.numel():
        return 0.0
    powers = (reference.view(torch.int32) & _EXPONENT).view(torch.float32)
    spacing = powers.clamp_min_(fmt.smallest_normal) if clamped else powers
    steps = gap.div_(spacing)
    return max(-float(steps.amin()), float(steps.amax())) / fmt.epsilon  # aminmax takes longer than both


def _nonzero(x: torch.Tensor) -> int:
    if not is_low(x.dtype):
        return int(torch.count_nonzero(x))
    return _positive(x.view(torch.int16) & _MAGNITUDE_16)


def _normal(x: torch.Tensor, fmt: Format) -> int:
    """How many magnitudes reach the format's smallest normal number."""
    if x.dtype is not fmt.dtype:
        return int(torch.count_nonzero(x.float().abs() >= fmt.smallest_normal))
    return _positive(x.view(torch.int16) & (_MAGNITUDE_16 >> fmt.mantissa << fmt.mantissa))


def _positive(bits: torch.Tensor) -> int:
    """How many of these magnitudes are not 0; numpy takes a quarter of torch's time to count them."""
    return int(np.count_nonzero(bits.numpy()) if bits.device.type == "cpu" else torch.count_nonzero(bits))


def _norm(x: torch.Tensor) -> float:
    """L2 norm of one chunk in float32; in float64 where squares would leave float32's range."""
    size = float(torch.linalg.vector_norm(x))
    if _SMALL < size < _LARGE or (size == 0 and _is_zero(x)):
        return size
    return float(torch.linalg.vector_norm(x, dtype=torch.float64))


def _is_zero(x: torch.Tensor) -> bool:
    """Whether all entries are 0, asked of those whose squares are, in float32."""
    return not x.numel() or float(x.amax()) == 0 == float(x.amin())


def _range(spans: Sequence[_Span], counts: list[int], norm: float) -> Magnitudes:
    largest = max(span.largest for span in spans)
    if largest == 0:
        return Magnitudes(0.0, 0.0, counts[0], {})
    zeros = sum(span.zeros for span in spans)
    exponents = {index - _BIAS: count for index, count in enumerate(counts[1:_BEYOND], start=1) if count}
    if counts[0] > zeros:
        exponents = {-_BIAS: counts[0] - zeros, **exponents}
    smallest = min(span.smallest for span in spans)
    return Magnitudes(_as_float(largest), _as_float(smallest), zeros, exponents, norm=norm)


def _finite_range(x: torch.Tensor) -> Magnitudes:
    finite = x[torch.isfinite(x)]
    return replace(Profile(finite).range, nonfinite=x.numel() - finite.numel())


def _bits(x: float) -> int:
    return int(torch.tensor(x, dtype=torch.float32).view(torch.int32))


def _as_float(bits: int) -> float:
    return float(torch.tensor(bits, dtype=torch.int32).view(torch.float32))
