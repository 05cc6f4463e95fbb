"""Histograms of magnitudes by powers of two; they show, for every loss scale, which shares underflow or overflow."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn

from ..records import Magnitudes
from .casting import in_format
from .formats import FORMATS, Format
from .metrics import relative_l2, runs, sum_of_squares

SIGNIFICANT_BITS = 24
"""Bits of FP32's significand: a number this many powers of two below another number vanishes in their sum."""

_BIAS, _BEYOND = 127, 255
_EXPONENT_SHIFT, _EXPONENT_FIELD = 23, 0xFF
_EXPONENT = _EXPONENT_FIELD << _EXPONENT_SHIFT


def histogram_of(x: torch.Tensor) -> Magnitudes:
    """Counts of a real tensor's finite entries by power of two, with L2 norm and extremes; counts of other entries."""
    exponents: Counter[int] = Counter()
    zeros = 0
    largest = 0.0
    smallest = math.inf
    square = 0.0
    for (run,) in runs(x.detach().float()):
        sizes = run.abs().reshape(-1)
        if sizes.numel() and not float(sizes.amax()) < math.inf:
            sizes = sizes[sizes < math.inf]
        exponents.update(exponent_counts(sizes))
        square += sum_of_squares(sizes)
        if not sizes.numel():
            continue
        low, high = map(float, torch.aminmax(sizes))
        if not low:
            zeros += sizes.numel() - int(torch.count_nonzero(sizes.bool()))
            low = float(nn.functional.threshold(sizes, 0.0, math.inf).amin())  # the smallest nonzero entry
        largest = max(largest, high)
        smallest = min(smallest, low)
    nonfinite = x.numel() - exponents.total()
    exponents[-_BIAS] -= zeros
    counts = {exponent: count for exponent, count in sorted(exponents.items()) if count}
    least = smallest if smallest < math.inf else 0.0
    return Magnitudes(largest, least, zeros, counts, nonfinite, math.sqrt(square))


def magnitudes_of(x: torch.Tensor) -> Magnitudes:
    """The result of `histogram_of`, plus the tensor's relative L2 rounding errors in FP16 and BF16."""
    result = histogram_of(x)
    if not result.max_abs:
        return result
    values = x.detach().float().reshape(-1)
    finite = values[torch.isfinite(values)] if result.nonfinite else values
    rounding = {name: _rounding(finite, FORMATS[name], result.max_abs) for name in ("fp16", "bf16")}
    return replace(result, rounding=rounding)


def _rounding(x: torch.Tensor, fmt: Format, largest: float) -> float:
    """Relative L2 error of rounding `x` to a format, after scaling by a power of two to a largest entry near 1."""
    scaled = torch.ldexp(x, torch.tensor(-math.floor(math.log2(largest))))
    return relative_l2(scaled, scaled.to(fmt.dtype))


def exponent_counts(x: torch.Tensor) -> dict[int, int]:
    """{floor(log2|x|): count} of float32 entries; zeros and subnormals count as -127, Inf and NaN as 128."""
    bits = (x.contiguous().view(torch.int32) >> _EXPONENT_SHIFT) & _EXPONENT_FIELD
    counts = torch.bincount(bits.reshape(-1), minlength=_BEYOND + 1).tolist()
    return {index - _BIAS: count for index, count in enumerate(counts) if count}


def merge_magnitudes(parts: Iterable[Magnitudes]) -> Magnitudes:
    """Range statistics of several tensors, pooled as if they were one tensor."""
    exponents: Counter[int] = Counter()
    zeros = 0
    nonfinite = 0
    largest = 0.0
    smallest = math.inf
    square = 0.0  # of the L2 norm
    error_squares = defaultdict[str, float](float)  # {format: squared L2 norm of the rounding error}
    for part in parts:
        exponents.update(part.exponents)
        zeros += part.zeros
        nonfinite += part.nonfinite
        largest = max(largest, part.max_abs)
        smallest = min(smallest, part.min_abs or math.inf)
        square += part.norm**2
        for name, error in part.rounding.items():
            error_squares[name] += (error * part.norm) ** 2
    rounding = dict[str, float]()
    if square:
        rounding = {name: math.sqrt(error_square / square) for name, error_square in error_squares.items()}
    least = smallest if smallest < math.inf else 0.0
    ordered = dict(sorted(exponents.items()))
    return Magnitudes(largest, least, zeros, ordered, nonfinite, math.sqrt(square), rounding)


def significant(histogram: Magnitudes) -> Magnitudes:
    """One tensor's histogram without the entries so small that even FP32 loses them in a sum with the largest entry.

    Saturated outputs leave gradients of 1e-30 next to gradients of 1e-3: no format needs to represent the smaller ones.
    """
    top = max(histogram.exponents, default=0)
    kept = {e: n for e, n in histogram.exponents.items() if e >= top - SIGNIFICANT_BITS}
    return replace(histogram, exponents=kept)


def underflow_share(exponents: Mapping[int, int], fmt: Format, shift: int = 0) -> float:
    """Share of the non-zero entries that `fmt` rounds to zero after multiplication by 2 ** shift.

    The threshold is half the smallest subnormal: smaller values round to zero.
    """
    edge = fmt.min_exponent - fmt.mantissa - 1
    return _share(exponents, lambda e: e + shift < edge)


def subnormal_share(exponents: Mapping[int, int], fmt: Format, shift: int = 0) -> float:
    """Share of the non-zero entries whose exponent is subnormal in the format after multiplication by 2 ** shift."""
    edge = fmt.min_exponent - fmt.mantissa - 1
    return _share(exponents, lambda e: edge <= e + shift < fmt.min_exponent)


def _share(exponents: Mapping[int, int], within: Callable[[int], bool]) -> float:
    total = sum(exponents.values())
    return sum(n for e, n in exponents.items() if within(e)) / total if total else 0.0


def largest_scale(histogram: Magnitudes, fmt: Format) -> float:
    """The largest power of two that can multiply all entries without overflow in `fmt`; inf if all are zero."""
    if histogram.max_abs == 0:
        return math.inf
    return 2.0 ** math.floor(math.log2(fmt.largest) - math.log2(histogram.max_abs))


@dataclass(frozen=True)
class Deviation:
    """Difference between a candidate and a reference. error: relative L2. max_ulp: the largest difference of an entry,
    in units of the format's spacing at the reference.

    overflow, nan: number of finite entries that became Inf and NaN. underflow, subnormal: shares of the non-zero
    entries that became zero, or smaller than the smallest normal number.
    """

    error: float = 0.0
    overflow: int = 0
    nan: int = 0
    underflow: float = 0.0
    subnormal: float = 0.0
    max_ulp: float = 0.0


class Profile:
    """Statistics of a real reference tensor [*], in float32; its entries must not change while the Profile is used."""

    def __init__(self, x: torch.Tensor) -> None:
        self._float = x.detach().float()
        self._roundings: dict[str, Deviation] = {}
        self.range = histogram_of(self._float)

    @property
    def rms(self) -> float:
        """Root mean square; 0 for an empty tensor or one with non-finite entries."""
        return 0.0 if self.range.nonfinite else self.range.norm / math.sqrt(max(self._float.numel(), 1))

    def rounding(self, fmt: Format) -> Deviation:
        """How the tensor changes when it is rounded to `fmt`; cached."""
        if fmt.name not in self._roundings:
            self._roundings[fmt.name] = self.deviation(in_format(self._float, fmt), fmt)
        return self._roundings[fmt.name]

    def error(self, candidate: torch.Tensor) -> float:
        """Relative L2 error of a candidate. If the result is infinite and the tensor has Inf or NaN, only the tensor's
        finite entries count."""
        gaps = (low.float() - r for r, low in runs(self._float, candidate.detach()))
        return self._relative(sum(map(sum_of_squares, gaps)), candidate)

    def _relative(self, squares: float, candidate: torch.Tensor) -> float:
        """The relative L2 error of a candidate. squares: the sum of all squared differences, if finite."""
        if self.range.norm and math.isfinite(squares):
            return math.sqrt(squares) / self.range.norm
        error = relative_l2(self._float, candidate)
        if error < math.inf or not self.range.nonfinite:
            return error
        kept = torch.isfinite(self._float)  # masks contain infinities on purpose
        return relative_l2(self._float[kept], candidate[kept])

    def deviation(self, candidate: torch.Tensor, fmt: Format) -> Deviation:
        """How `candidate` (same shape, any real dtype) differs from the tensor, in one pass.

        Differences are in float32, exact for two close numbers (Sterbenz). max_ulp is inf if an entry is finite in the
        tensor but not in the candidate.
        """
        squares = 0.0
        max_ulp = 0.0
        damage = Counter[str]()
        for reference, low in runs(self._float, candidate.detach()):
            if not reference.numel():
                break
            values = low.float()
            gap = values - reference
            sizes = values.abs()
            squares += sum_of_squares(gap)
            max_ulp = max(max_ulp, _steps(gap, reference, fmt))
            least, largest = map(float, torch.aminmax(sizes))
            is_undamaged = fmt.smallest_normal <= least and largest < math.inf
            if not is_undamaged:
                damage += self._damage(reference, sizes, fmt)
        error = self._relative(squares, candidate)
        shares = {kind: damage[kind] / max(self.range.nonzero, 1) for kind in ("underflow", "subnormal")}
        return Deviation(error, damage["overflow"], damage["nan"], **shares, max_ulp=max_ulp)

    def _damage(self, reference: torch.Tensor, size: torch.Tensor, fmt: Format) -> Counter[str]:
        """Counts of finite entries that overflowed or underflowed. size: absolute values of the candidate."""
        counts, regular = Counter[str](), reference.bool()
        if self.range.nonfinite:
            regular &= reference.isfinite()
        small = (size < fmt.smallest_normal).logical_and_(regular)
        if many := int(torch.count_nonzero(small)):
            counts["underflow"] = many - int(torch.count_nonzero(small & size.bool()))
            counts["subnormal"] = many - counts["underflow"]
        if not float(size.amax()) < math.inf:
            finite = reference.isfinite()
            counts["overflow"] = int(torch.count_nonzero(finite & (size == math.inf)))
            counts["nan"] = int(torch.count_nonzero(finite & size.isnan()))
        return counts


def _steps(gap: torch.Tensor, reference: torch.Tensor, fmt: Format) -> float:
    """The largest difference in units of the format's spacing at the reference; overwrites `gap`."""
    power = (reference.view(torch.int32) & _EXPONENT).view(torch.float32)  # the largest power of two up to |r|
    steps = gap.div_(power.clamp_(fmt.smallest_normal))
    largest = max(map(abs, map(float, torch.aminmax(steps))))
    if not largest < math.inf:
        steps = torch.where(reference.isfinite(), steps.abs().nan_to_num(math.inf, math.inf), 0.0)
        largest = float(steps.max())
    return largest / fmt.epsilon
