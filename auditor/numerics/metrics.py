"""Error metrics between a reference and a candidate: differences in float32 or wider, chunks summed in float64."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch

from ..errors import MeasureError
from ..records.ledger import Loss
from .entries import ON_GPU, dense, entries, is_plain, places

_RUN = 1 << 17
"""Number of entries per chunk; copies of a chunk fit in the processor's cache."""

_SQUARES = (1e-24, 1e36)
"""Range of sums of squares that are accurate in float32; sums outside it are computed in float64."""


def relative_l2(reference: torch.Tensor, candidate: torch.Tensor) -> float:
    """Relative L2 error of `candidate` against `reference`.

    Shapes: both [*], equal. Dtypes: any float. Units: 1 (ratio). Formula: ||c - r|| / ||r||. Edge: r == 0 -> 0.0 if c
    == 0 else inf; empty -> 0.0; NaN or Inf only in c -> inf. Raises: MeasureError(slug="shape-mismatch"). Source:
    Higham, Accuracy and Stability of Numerical Algorithms, section 1.2.
    """
    return output_error([reference], [candidate])


def output_error(reference: Sequence[torch.Tensor], candidate: Sequence[torch.Tensor]) -> float:
    """Relative L2 error of all floating-point tensors together, or the largest share of differing entries in a discrete
    tensor, if that share is larger.

    Entries where the reference is infinite must be equal, or the error is inf; entries where it is NaN are ignored.
    Raises: MeasureError(slug="shape-mismatch").
    """
    squares = 0.0
    norm = 0.0
    flipped = 0.0
    for r, c in comparable_pairs(reference, candidate):
        if not (r.is_floating_point() or r.is_complex()):
            flipped = max(flipped, disagreement(r, c))
            continue
        for run in runs(r, c):
            square, size = _squares(*run)
            squares += square
            norm += size
    if not math.isfinite(squares):
        return math.inf
    if norm > 0:
        return max(math.sqrt(squares / norm), flipped)
    return flipped if squares == 0 else math.inf


def _squares(r: torch.Tensor, c: torch.Tensor) -> tuple[float, float]:
    """(sum of squared differences, sum of squared reference entries) of a chunk; see `_finite_part` for Inf and NaN."""
    reference = entries(r.detach())
    candidate = entries(c.detach())
    wide = torch.promote_types(torch.promote_types(reference.dtype, candidate.dtype), torch.float32)
    wide_reference = reference.to(wide)
    square = sum_of_squares(candidate.to(wide) - wide_reference)
    size = sum_of_squares(wide_reference)
    if math.isfinite(square) and math.isfinite(size):
        return square, size
    return _finite_part(reference.double(), candidate.double())


def sum_of_squares(x: torch.Tensor) -> float:
    """Sum of squares of all entries of a chunk; in float64 if float32 would overflow or underflow."""
    flat = x.reshape(-1)
    square = float(torch.dot(flat, flat))
    if _SQUARES[0] < square < _SQUARES[1] or not flat.numel() or not int(torch.count_nonzero(flat.bool())):
        return square
    return float(flat.double().square().sum())


def runs(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Split tensors of one shape into chunks that fit a processor's cache; on a GPU, into larger chunks. The entries are in
    the first tensor's order in memory, so that tensors with the same strides are not copied."""
    step = _RUN if tensors[0].device.type == "cpu" else ON_GPU
    if tensors[0].numel() <= step:
        yield tensors
        return
    order = sorted(range(tensors[0].dim()), key=tensors[0].stride, reverse=True)
    yield from zip(*(torch.split(x.permute(order).reshape(-1), step) for x in tensors), strict=True)


def _finite_part(r: torch.Tensor, c: torch.Tensor) -> tuple[float, float]:
    """Squared error and squared norm of the entries with a finite reference; error inf if an infinite entry differs."""
    finite = torch.isfinite(r)
    infinite = torch.isinf(r)
    zero = torch.zeros_like(r)
    kept = torch.where(finite, r, zero)
    square = float(torch.where(finite, c - kept, zero).square().sum())
    if not math.isfinite(square) or not torch.equal(torch.where(infinite, r, zero), torch.where(infinite, c, zero)):
        square = math.inf
    return square, float(kept.square().sum())


def loss_of(before: torch.Tensor, after: torch.Tensor) -> Loss | None:
    """How a cast changed a tensor's values, as a Loss; None if all are unchanged. Shapes: both [*], equal."""
    wider = before.dtype if before.dtype.itemsize > 1 else after.dtype
    wide = torch.promote_types(wider, torch.float32)
    ours = entries(before.detach()).to(wide)
    theirs = entries(after.detach()).to(wide)
    changed = (ours != theirs) & ~(ours.isnan() & theirs.isnan())
    if not changed.any():
        return None
    finite = ours.isfinite() & theirs.isfinite()
    error = relative_l2(ours[finite], theirs[finite])
    nonzero = ours != 0
    flushed = nonzero & (theirs == 0)
    zeros = float(flushed.sum() / nonzero.sum().clamp(min=1))
    overflowed = ours.isfinite() & ~theirs.isfinite()
    return Loss(error, float(changed.double().mean()), zeros, int(overflowed.sum()))


def disagreement(reference: torch.Tensor, candidate: torch.Tensor) -> float:
    """Share of entries of a discrete tensor (indices, masks) that differ; 0.0 for an empty tensor."""
    return int((reference != candidate).sum()) / max(reference.numel(), 1)


def sqnr_db(relative_error: float) -> float:
    """Signal to quantisation noise ratio, 20 log10(1 / relative_error), in dB; inf for an exact result."""
    if relative_error == 0:
        return math.inf
    return -20 * math.log10(relative_error) if math.isfinite(relative_error) else -math.inf


def comparable_pairs(
    reference: Sequence[torch.Tensor], candidate: Sequence[torch.Tensor]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Pairs of strided tensors to compare entry by entry.

    Raises: MeasureError(slug="shape-mismatch") if numbers of tensors or shapes differ.
    """
    if len(reference) != len(candidate):
        counts = f"one run returned {len(reference)} output tensors, another {len(candidate)}"
        raise MeasureError(f"{counts}: the number of outputs must not depend on the precision.", slug="shape-mismatch")
    pairs = [pair for r, c in zip(reference, candidate, strict=True) for pair in _comparable(r, c)]
    for r, c in pairs:
        if r.shape != c.shape:
            raise MeasureError(
                f"one run returned an output of shape {tuple(r.shape)}, another of shape {tuple(c.shape)}: "
                "the shape of an output must not depend on the precision.",
                slug="shape-mismatch",
            )
    return pairs


def _comparable(r: torch.Tensor, c: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Pairs of strided tensors: the entries of two sparse tensors with equal indices, or parts of nested tensors."""
    r, c = r.detach(), c.detach()
    if r.is_nested and c.is_nested:
        parts = r.unbind(), c.unbind()
        return [] if len(parts[0]) == len(parts[1]) == 0 else list(zip(*parts, strict=True))
    if is_plain(r) and is_plain(c):
        return [(r, c)]
    ours, theirs = places(r), places(c)
    same = len(ours) == len(theirs) and all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    if r.shape == c.shape and same:
        return [(entries(r), entries(c))]
    return [(dense(r), dense(c))]
