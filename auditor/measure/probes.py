"""Hutchinson's estimator: random signs, one backward pass each, and squared inner products of gradients with errors."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from ..criteria.margins import Form
from ..numerics.casting import in_format, plain
from ..numerics.entries import ON_GPU
from ..numerics.formats import Format

PARTS = 1024
SHORT = 16
"""Length of a chunk below which summing its products takes longer than computing them."""

_CHUNK = 1 << 18

_FEW_TERMS = 4
"""Minimum number of squares from which their scatter is estimated."""

_LEVELS = (1024, 128, 16, 1)
"""Maximum number of parts into which an error is split, by level."""

_DOUBT = 3.3
"""A standard normal exceeds this value once in 2000 draws. If sums differ by more, parts of an error are correlated."""


@dataclass(frozen=True)
class Probe:
    """One backward pass. signs: random signs for each output. total: the scalar <signs, outputs>, to differentiate."""

    signs: list[torch.Tensor]
    total: torch.Tensor


def probes(tensors: Sequence[torch.Tensor], count: int, seed: int, shape: Sequence[Form] = ()) -> Iterator[Probe]:
    """Generate `count` Probes of the tensors, lazily. shape: one function per tensor, applied to the signs.

    For a random sign vector v and the effect J d of any error d on the tensors y, E<v, J d>^2 = ||J d||^2. A backward
    pass from <v, y> gives <v, J d> = <J^T v, d> for all errors at once. Source: Hutchinson, A stochastic estimator of
    the trace (1989).
    """
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        drawn = [signs(x, generator) for x in tensors]
        drawn = [form(x) for x, form in zip(drawn, shape, strict=True)] if shape else drawn
        # A sum, not `grad_tensors`: to compare their shapes, torch imports a compiler.
        total = torch.stack([(x * weight).sum() for x, weight in zip(tensors, drawn, strict=True)]).sum()
        yield Probe(drawn, total)


def signs(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Random signs; zero at non-finite entries, such as masked ones, which no error changes."""
    result = torch.randint(0, 2, x.shape, generator=generator, dtype=torch.int8).mul_(2).sub_(1).to(x)
    return result.masked_fill_(~torch.isfinite(x.detach()), 0.0)


def inner_products(
    gradient: torch.Tensor, value: torch.Tensor, samples: int, rows: Sequence[Format | None] = (None,)
) -> list[torch.Tensor]:
    """Compute <gradient, error> per sample and part for each format in `rows`: a tensor [passes * samples, parts].

    Parts are PARTS contiguous chunks, or single entries if chunks would be shorter than SHORT. gradient: [*] or
    [passes, *]. value: [*], with samples in equal chunks. rows: formats, for the error of rounding `value` to each;
    None means that `value` is the error itself. Non-finite products count as zero.
    """
    values = value.detach().reshape(samples, -1)
    flat = gradient.detach().reshape(-1, *values.shape)  # [passes, samples, entries]
    width = values.shape[1] // PARTS
    if width < SHORT:
        return [_products(flat, values, row).flatten(0, 1) for row in rows]
    whole = width * PARTS
    gradients = flat[..., :whole].view(-1, samples, PARTS, width)
    parts = values[:, :whole].view(samples, PARTS, width)
    most = _CHUNK if flat.device.type == "cpu" else ON_GPU
    if flat.numel() <= most:
        result = [_products(gradients, parts, row).sum(-1) for row in rows]
    else:
        result = _sums_in_chunks(gradients, parts, rows, max(1, most // width))
    if whole < values.shape[1]:  # the last part is longer
        for sums, row in zip(result, rows, strict=True):
            rest = _products(flat[..., whole:], values[:, whole:], row)
            sums[..., -1] += rest.sum(-1)
    return [sums.flatten(0, 1) for sums in result]


def _sums_in_chunks(
    gradients: torch.Tensor, parts: torch.Tensor, rows: Sequence[Format | None], step: int
) -> list[torch.Tensor]:
    """Inner products of all parts, `step` parts at a time, which fit into the cache. Shapes: gradients [passes, samples,
    PARTS, width], parts [samples, PARTS, width] -> [passes, samples, PARTS] for each of `rows`."""
    passes, samples, count, _ = gradients.shape
    result = [gradients.new_empty(passes, samples, count) for _ in rows]
    for sample in range(samples):
        for start in range(0, count, step):
            chunk = slice(start, start + step)
            for sums, row in zip(result, rows, strict=True):
                products = _products(gradients[:, sample, chunk], parts[sample, chunk], row)
                sums[:, sample, chunk] = products.sum(-1)
    return result


def _products(gradient: torch.Tensor, value: torch.Tensor, row: Format | None) -> torch.Tensor:
    error = value
    if row is not None:
        # Always a copy: if the value is in the format already, `in_format` returns the caller's tensor.
        error = plain(in_format(value, row)).to(value.dtype, copy=True).sub_(value)
    return (error.to(gradient.dtype) * gradient).nan_to_num_(0.0, 0.0, 0.0)


@dataclass
class Sums:
    """Running sums, over probes and samples, of squared inner products with parts of the error, finest parts first.

    squares: sums by level. counts: number of terms in each sum. finest: terms of the finest level's sum, by probe and
    sample.
    """

    squares: list[float] = field(default_factory=lambda: [0.0] * len(_LEVELS))
    counts: list[int] = field(default_factory=lambda: [0] * len(_LEVELS))
    finest: list[float] = field(default_factory=list)

    def add(self, squares: list[list[float]], counts: list[int]) -> None:
        """Add squared inner products, by level and sample, with the number of terms in each level."""
        self.squares = [total + sum(new) for total, new in zip(self.squares, squares, strict=True)]
        self.counts = [total + new for total, new in zip(self.counts, counts, strict=True)]
        self.finest += squares[0]

    def square(self) -> float:
        """Estimate of the sum, over probes and samples, of the squared inner products with the whole error.

        Rounding errors of different parts are assumed to be independent, so squares of parts add up, and many parts
        average well. If the sum for larger parts differs by more than chance, smaller parts are correlated; the
        estimate from larger parts is used, which is noisier but unbiased.
        """
        result = self.squares[0]
        for square, count in zip(self.squares[1:], self.counts[1:], strict=True):
            low, high = chance(count)
            if not low * result <= square <= high * result:
                result = square
        return result

    def scatter(self) -> float:
        """Relative standard error of the square root of the finest level's sum; nan for fewer than four terms."""
        terms, total = len(self.finest), self.squares[0]
        if terms < _FEW_TERMS or not total:
            return math.nan
        return statistics.stdev(self.finest) * math.sqrt(terms) / total / 2


def by_level(several: Sequence[torch.Tensor]) -> list[tuple[list[list[float]], list[int]]]:
    """For each tensor [samples, parts]: sums of squares by level and sample, and the number of terms by level."""
    if not several:
        return []
    samples = several[0].shape[0]
    inner = torch.cat([one.double() for one in several])
    sums, counts = [], []
    for parts in _LEVELS:
        given = inner.shape[1]
        if given > parts:  # neighbors are added up
            width = -(-given // parts)
            inner = nn.functional.pad(inner, (0, -given % width)).view(len(inner), -1, width).sum(2)
        sums.append(torch.linalg.vecdot(inner, inner))
        counts.append(inner.numel() // len(several))
    squares: list[list[float]] = torch.stack(sums).tolist()
    parted = range(0, samples * len(several), samples)
    return [([level[start : start + samples] for level in squares], counts) for start in parted]


def chance(count: int) -> tuple[float, float]:
    """Bounds of the mean of `count` squared standard normals, each exceeded 1 in 2000 times (Wilson and Hilferty,
    1931)."""
    spread = 2 / (9 * count)
    low, high = (1 - spread + side * _DOUBT * math.sqrt(spread) for side in (-1, 1))
    return max(low, 0.0) ** 3, high**3
