"""Fingerprints: a few sums over the entries of a tensor, by which equal values are recognized without storing them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch

from ...numerics.entries import entries

LARGEST = 1e30
"""Entries beyond this magnitude stand for infinity, such as the fill value of a mask; they count as `masked`."""

SKETCHES = 32
"""Number of random projections of an output. Their differences estimate the distance of two outputs to about 25 %."""


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
    flat = entries(x.detach()).double().reshape(-1)
    counted = flat.abs() < LARGEST  # False for NaN
    count = len(flat)
    masked = count - int(counted.sum())
    if live is not None:
        alive = live.reshape(-1)
        count = int(alive.sum())
        masked = int((alive & ~counted).sum())
        counted &= alive
    if count != len(flat) or masked:
        flat = torch.where(counted, flat, 0.0)
    size = flat.abs()
    square = flat * flat
    weights = _projections(len(flat), flat.device)
    sums = torch.stack([flat.sum(), size.sum(), square.sum(), square @ flat, square @ size, flat @ weights]).tolist()
    first, magnitude, second, third, volume, order = sums
    return Fingerprint(tuple(x.shape), count, masked, first, magnitude, second, third, volume, order)


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


def sketch(x: torch.Tensor) -> list[float]:
    """SKETCHES random projections of a tensor; the random signs are the same in every process and version."""
    flat = entries(x.detach()).double().reshape(-1)
    flat = torch.where(flat.abs() < LARGEST, flat, 0.0)
    positions = torch.arange(len(flat), dtype=torch.int64, device=flat.device)
    return [float(flat @ _signs(positions, number)) for number in range(SKETCHES)]


def _signs(positions: torch.Tensor, number: int) -> torch.Tensor:
    """Pseudo-random signs, 1.0 or -1.0, one for each position: bits of an integer hash (of splitmix64)."""
    start = (number + 1) * 0xBF58476D1CE4E5B % 2**62
    bits = positions * 0x9E3779B97F4A7C1 + start
    bits = (bits ^ (bits >> 30)) * 0x3F58476D1CE4E5B9
    bits = (bits ^ (bits >> 27)) * 0x14D049BB133111EB
    return ((bits >> 40) & 1).double() * 2 - 1


def sketch_distance(one: list[float], other: list[float]) -> float:
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
