"""Fingerprints: a few sums over the entries of a tensor, by which equal values are recognized without storing them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import torch

from ...numerics.entries import entries

LARGEST = 1e30
"""Entries beyond this magnitude stand for infinity, such as the fill value of a mask; they count as `masked`."""

CACHED = 1 << 17
"""Number of entries of which the processor's cache holds a few copies in FP64."""

SKETCHES = 16
"""Number of random sums of an output. Their differences estimate the distance of two outputs to about 20 %."""


@dataclass(frozen=True)
class Fingerprint:
    """Sums over the entries of one tensor, in FP64.

    shape: of the tensor; () for sums of several tensors. count: number of entries that count. masked: number of entries
    that are not finite, or beyond LARGEST; the sums leave them out. first, second, third: sums of x, x**2, x**3.
    size, volume: sums of |x| and |x|**3. order: a projection that depends on the order of the entries, None for sums
    of several tensors. All but `order` are equal for tensors that are permutations of one another, and add up over the
    parts of a tensor.
    """

    shape: tuple[int, ...]
    count: int
    masked: int
    first: float
    size: float
    second: float
    third: float
    volume: float
    order: float | None

    def __add__(self, other: Fingerprint) -> Fingerprint:
        """The fingerprint of all entries of two tensors."""
        return Fingerprint(
            (),
            self.count + other.count,
            self.masked + other.masked,
            self.first + other.first,
            self.size + other.size,
            self.second + other.second,
            self.third + other.third,
            self.volume + other.volume,
            None,
        )

    def to_list(self, whole: bool = True) -> list[Any]:
        """The values in order, for a file. whole: with shape and order."""
        sums = [float(f"{x:.15g}") for x in (self.first, self.size, self.second, self.third, self.volume)]
        return [list(self.shape) if whole else [], self.count, self.masked, *sums, self.order if whole else None]

    @classmethod
    def of_list(cls, values: list[Any]) -> Fingerprint:
        """The inverse of `to_list`."""
        shape, *rest = values
        return cls(tuple(shape), *rest)


def total(parts: Iterable[Fingerprint]) -> Fingerprint:
    """The fingerprint of all entries of several tensors."""
    return reduce(Fingerprint.__add__, parts)


class Projections:
    """The weights of the projections by order, computed once for the longest tensor."""

    def __init__(self) -> None:
        self._weights = torch.empty(0, dtype=torch.float64)

    def __call__(self, length: int, device: torch.device) -> torch.Tensor:
        """The first `length` weights: no two are equal, and their sum stays bounded. Shape: [length]."""
        if len(self._weights) < length or self._weights.device != device:
            positions = torch.arange(max(length, 1024), dtype=torch.float64, device=device)
            self._weights = torch.cos(positions * 1.2345 + 0.7)
        return self._weights[:length]


_projections = Projections()


def project(x: torch.Tensor) -> torch.Tensor:
    """A projection of a tensor that depends on the order of its entries and is the same in every process. Shape: []."""
    flat = entries(x).reshape(-1)
    return (flat * _projections(len(flat), flat.device).to(flat.dtype)).sum()


def fingerprint(x: torch.Tensor, live: torch.Tensor | None = None) -> Fingerprint:
    """The fingerprint of a tensor. live: booleans of the shape of `entries(x)`, True for entries that count."""
    flat = entries(x.detach()).reshape(-1)
    alive = None if live is None else live.reshape(-1)
    weights = _projections(len(flat), flat.device)
    count = len(flat) if alive is None else int(alive.sum())
    masked = 0
    total_sums = [0.0] * 6
    for part in _parts(flat):
        own = flat[part].double()
        if alive is not None:
            own = torch.where(alive[part], own, 0.0)
        sums = _sums(own, weights[part])
        if not sums[2] < LARGEST**2:  # the sum of squares; also for NaN
            counted = own.abs() < LARGEST
            masked += len(own) - int(counted.sum())
            sums = _sums(torch.where(counted, own, 0.0), weights[part])
        total_sums = [x + y for x, y in zip(total_sums, sums, strict=True)]
    first, magnitude, second, third, volume, order = total_sums
    return Fingerprint(tuple(x.shape), count, masked, first, magnitude, second, third, volume, order)


def _sums(x: torch.Tensor, weights: torch.Tensor) -> list[float]:
    """The six sums of a fingerprint, over a vector."""
    size = x.abs()
    square = x * x
    sums = [x.sum(), size.sum(), square.sum(), square @ x, square @ size, x @ weights]
    return list(torch.stack(sums).tolist())


def reordered(print: Fingerprint, x: torch.Tensor, same_order: bool) -> Fingerprint:
    """The fingerprint of a tensor that has the entries of another one, given that one's; its sums are the same."""
    if same_order or x.numel() < 2:
        return replace(print, shape=tuple(x.shape))
    flat = entries(x.detach()).double().reshape(-1)
    if print.masked:
        return fingerprint(x)
    return replace(print, shape=tuple(x.shape), order=float(flat @ _projections(len(flat), flat.device)))


def _parts(flat: torch.Tensor) -> Iterator[slice]:
    """Slices of a vector: on a CPU so short that several passes over one stay in the cache."""
    length = CACHED if flat.device.type == "cpu" else max(len(flat), 1)
    return (slice(start, start + length) for start in range(0, len(flat), length))


@dataclass(frozen=True)
class Deviation:
    """How a result of a run deviates from FP64's. error: relative L2 difference; inf if only the run is not finite. sums,
    order: relative changes of the fingerprint's sums, and of the projection by order."""

    error: float = 0.0
    sums: float = 0.0
    order: float = 0.0


def deviation(run: torch.Tensor, wide: torch.Tensor, print: Fingerprint) -> Deviation:
    """How a result of a run deviates from FP64's; discrete results do not. print: the fingerprint of `wide`.

    Shapes may differ if they depend on values: then the error is inf.
    """
    if run.shape != wide.shape:
        return Deviation(math.inf)
    if not (run.is_floating_point() or run.is_complex()) or run.dtype is wide.dtype:
        return Deviation()
    ours, exact = entries(run.detach()).reshape(-1), entries(wide.detach()).reshape(-1)
    ours = ours.to(exact.device)
    weights = _projections(len(exact), exact.device)
    total_sums = [0.0] * 4
    for part in _parts(exact):
        x = exact[part]
        difference = ours[part].double() - x
        sums = _deviating(difference, x, weights[part])
        if print.masked or not all(map(math.isfinite, sums)):
            counted = x.abs() < LARGEST
            if bool((counted & ~ours[part].isfinite()).any()):
                return Deviation(math.inf)
            sums = _deviating(torch.where(counted, difference, 0.0), torch.where(counted, x, 0.0), weights[part])
        total_sums = [x + y for x, y in zip(total_sums, sums, strict=True)]
    squared, first, product, order = total_sums
    if not print.second:
        return Deviation(1.0 if squared else 0.0)
    second = abs(2 * product + squared) / print.second
    return Deviation(
        math.sqrt(squared / print.second),
        max(abs(first) / print.size, second),
        abs(order) / math.sqrt(print.second),
    )


def _deviating(difference: torch.Tensor, x: torch.Tensor, weights: torch.Tensor) -> list[float]:
    """Sums of the squares, the entries, the products with x and with the weights."""
    sums = [difference @ difference, difference.sum(), difference @ x, difference @ weights]
    return list(torch.stack(sums).tolist())


def distance(one: Fingerprint, other: Fingerprint, ordered: bool = False) -> float:
    """The largest relative difference of two fingerprints' sums; inf if the numbers of entries differ.

    ordered: also compare shapes and the order of the entries, if both are known.
    """
    if one.count != other.count or one.masked != other.masked:
        return math.inf
    largest = max(
        _relative(one.second, other.second, max(one.second, other.second)),
        _relative(one.first, other.first, max(one.size, other.size)),
        _relative(one.size, other.size, max(one.size, other.size)),
        _relative(one.third, other.third, max(one.volume, other.volume)),
    )
    if not ordered or one.order is None or other.order is None:
        return largest
    if one.shape != other.shape:
        return math.inf
    return max(largest, _relative(one.order, other.order, math.sqrt(max(one.second, other.second))))


def _relative(x: float, y: float, scale: float) -> float:
    if not (math.isfinite(x) and math.isfinite(y)):
        return 0.0 if x == y else math.inf
    return abs(x - y) / scale if scale else float(x != y)


def sketch(*tensors: torch.Tensor) -> list[tuple[float, ...]]:
    """SKETCHES sums of each of some tensors of one shape: each entry, with a random sign, is in one random sum. Signs and
    sums are the same in every process."""
    flat = [entries(x.detach()).double().reshape(-1).cpu() for x in tensors]
    flat = [torch.where(x.abs() < LARGEST, x, 0.0) for x in flat]
    bits = _random_bits(len(flat[0]))
    sums = bits % SKETCHES
    signs = (bits // SKETCHES % 2).double() * 2 - 1
    return [tuple(torch.bincount(sums, weights=x * signs, minlength=SKETCHES).tolist()) for x in flat]


def _random_bits(length: int) -> torch.Tensor:
    """Pseudo-random whole numbers below 2**40, one for each position: of an integer hash (of splitmix64)."""
    positions = torch.arange(length, dtype=torch.int64)
    bits = positions * 0x9E3779B97F4A7C1 + 0xBF58476D1CE4E5B
    bits = (bits ^ (bits >> 30)) * 0x3F58476D1CE4E5B9
    bits = (bits ^ (bits >> 27)) * 0x14D049BB133111EB
    return (bits >> 24) & (2**40 - 1)


def sketch_distance(one: Sequence[float], other: Sequence[float]) -> float:
    """Estimated relative L2 distance of two tensors, from their sketches."""
    difference = math.sqrt(sum((x - y) ** 2 for x, y in zip(one, other, strict=True)))
    scale = max(math.hypot(*one), math.hypot(*other))
    return difference / scale if scale else 0.0


def parts_of_sum(whole: Fingerprint, parts: list[Fingerprint], tolerance: float) -> Iterator[range]:
    """Ranges of consecutive parts whose entries together are the entries of `whole`: [3d, d] = 3 x [d, d]."""
    for start in range(len(parts)):
        sum_of_parts = parts[start]
        for end in range(start + 1, len(parts)):
            sum_of_parts = sum_of_parts + parts[end]
            if sum_of_parts.count > whole.count:
                break
            if sum_of_parts.count == whole.count and distance(whole, sum_of_parts) <= tolerance:
                yield range(start, end + 1)
