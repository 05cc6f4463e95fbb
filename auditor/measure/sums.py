"""Sums of squared inner products with the parts of an error, and what they say of the whole of it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

_FEW_TERMS = 4
"""Fewer squares than this tell nothing of how they scatter."""

_LEVELS = (1024, 128, 16, 1)
"""Into how many parts, at most, an error is taken apart."""

_DOUBT = 3.3
"""Standard normal quantile of 1 in 2000: beyond it on either side, the parts of an error are held to be correlated."""


@dataclass
class Sums:
    """Running sums, over probes and samples, of the squared inner products of parts of the error: finest parts first.

    squares: sums by level. counts: how many squares each is the sum of. finest: the first sum, by probe and sample.
    """

    squares: list[float] = field(default_factory=lambda: [0.0] * len(_LEVELS))
    counts: list[int] = field(default_factory=lambda: [0] * len(_LEVELS))
    finest: list[float] = field(default_factory=list)

    def add(self, squares: list[list[float]], counts: list[int]) -> None:
        """Squares by level and sample, and how many there are in each level."""
        self.squares = [total + sum(new) for total, new in zip(self.squares, squares, strict=True)]
        self.counts = [total + new for total, new in zip(self.counts, counts, strict=True)]
        self.finest += squares[0]

    def add_whole(self, inner: float) -> None:
        """The inner product with the whole of an error: one part on every level."""
        self.add([[inner**2]] * len(_LEVELS), [1] * len(_LEVELS))

    def square(self) -> float:
        """Estimate of the sum, over probes and samples, of the squared inner products with the whole error.

        Errors of rounding are independent from part to part, so the squares of the parts add up, and being many they
        scatter little. Where larger parts add up to more or less than chance explains, smaller ones pull together or
        cancel each other, and the larger, which scatter more and err on no side, decide.
        """
        found = self.squares[0]
        for square, count in zip(self.squares[1:], self.counts[1:], strict=True):
            low, high = chance(count)
            if not low * found <= square <= high * found:
                found = square
        return found

    def scatter(self) -> float:
        """Relative standard error of the root of the finest sum, from how its terms differ; nan for fewer than four."""
        terms, total = len(self.finest), self.squares[0]
        if terms < _FEW_TERMS or not total:
            return math.nan
        return statistics.stdev(self.finest) * math.sqrt(terms) / total / 2


def by_level(several: Sequence[torch.Tensor]) -> list[tuple[list[list[float]], list[int]]]:
    """Of each, sums of squares by level and sample, and their numbers; <gradient, error>, shapes alike [samples, parts]."""
    if not several:
        return []
    samples = several[0].shape[0]
    inner = torch.cat([one.double() for one in several])
    sums, counts = [], []
    for parts in _LEVELS:
        inner = _merged(inner, parts)
        sums.append(torch.linalg.vecdot(inner, inner))
        counts.append(inner.numel() // len(several))
    squares: list[list[float]] = torch.stack(sums).tolist()
    parted = range(0, samples * len(several), samples)
    return [([level[start : start + samples] for level in squares], counts) for start in parted]


def _merged(inner: torch.Tensor, parts: int) -> torch.Tensor:
    """Sums of neighbouring parts, so that at most `parts` are left of each sample."""
    samples, given = inner.shape
    if given <= parts:
        return inner
    width = -(-given // parts)
    short = -given % width
    return (nn.functional.pad(inner, (0, short)) if short else inner).view(samples, -1, width).sum(2)


def chance(count: int) -> tuple[float, float]:
    """Bounds of the mean of `count` squared standard normals, missed once in 2000 (Wilson and Hilferty, 1931)."""
    spread = 2 / (9 * count)
    low, high = (1 - spread + side * _DOUBT * math.sqrt(spread) for side in (-1, 1))
    return max(low, 0.0) ** 3, high**3
