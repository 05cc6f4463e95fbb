"""Margins of decisions: the gap between the two best candidates, and how many flip under an error of a given size."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch

from ..numerics.entries import is_number, is_plain
from ..numerics.formats import FORMATS
from .criterion import Criterion
from .values import rows

BISECTIONS = 40
"""Number of bisections, over powers of two, to determine the allowed change of the margins."""


@dataclass(frozen=True)
class Margins:
    """The decisions of one output: the largest entry of a row, the k-th against the next, or an entry against a
    threshold.

    first, second: [decisions], indices of both candidates; no second: the threshold. signs: which candidate is larger.
    size: the margin, float64. lost: share of flips if every decision flipped. limit: the share that the criterion
    allows.
    """

    first: torch.Tensor
    second: torch.Tensor | None
    signs: torch.Tensor
    size: torch.Tensor
    lost: float
    limit: float

    def flips(self, change: float) -> float:
        """Expected share of flips where every margin changes by a normal error with this standard deviation."""
        return self.lost * float(torch.special.ndtr(-self.size / change).mean()) if change > 0 else 0.0

    @cached_property
    def allowed_change(self) -> float:
        """The standard deviation at which the expected share of flips equals the limit."""
        low, high = -64.0, 64.0
        for _ in range(BISECTIONS):
            middle = (low + high) / 2
            low, high = (middle, high) if self.flips(2.0**middle) <= self.limit else (low, middle)
        return float(2.0**low)

    def change(self, reference: torch.Tensor, candidate: torch.Tensor) -> float:
        """Root mean square of the differences between the margins of both runs.

        Where the candidate lies on a half format's grid, two entries closer than its spacing h are often equal, and
        half of those flip. That acts as an error uniform in [-h, h], whose variance h^2 / 3 is h^2 / 6 more than that
        of two roundings.
        """
        ours, theirs = (self._candidates(x) for x in (reference, candidate))
        square = (theirs[0] - theirs[1] - ours[0] + ours[1]).square().mean()
        grids = sorted((row for row in FORMATS.values() if row.low and row.native), key=lambda row: -row.epsilon)
        row = next((row for row in grids if _is_on_grid(theirs, row.dtype)), None)
        if row is not None and self.second is not None:
            unit = torch.full_like(theirs[0], row.epsilon / 2)
            square = square + torch.ldexp(unit, torch.frexp(theirs[0]).exponent).square().mean() / 6
        return float(square.sqrt())

    def _candidates(self, x: torch.Tensor) -> torch.Tensor:
        """Both candidates of every decision, float64 [2, decisions]; zero in place of the threshold."""
        entries = x.detach().flatten()
        first = entries[self.first].double()
        return torch.stack(
            [first, entries[self.second].double() if self.second is not None else torch.zeros_like(first)]
        )

    def share(self, reference: torch.Tensor, candidate: torch.Tensor) -> float:
        """The change of the margins divided by the allowed change."""
        return self.change(reference, candidate) / self.allowed_change


def margins_of(criterion: Criterion, reference: torch.Tensor) -> Margins | None:
    """The decisions that a criterion counts, where its limit allows some to flip; None for other measures.

    Decisions between equal or non-finite entries are left out: they count as never flipped.
    """
    kinds = ("top1", "topk", "flips")
    numbers = is_number(reference) and is_plain(reference) and not reference.is_complex()
    if criterion.kind not in kinds or criterion.function is not None or criterion.allows_nothing or not numbers:
        return None
    values = reference.detach()
    places = torch.arange(values.numel(), device=values.device).view(values.shape)
    limit, lost = criterion.limit, 1.0
    if criterion.kind == "flips":
        first, second = places.flatten(), None
        apart = values.flatten().double() - criterion.option("threshold", 0.0)
    else:
        k, limit = int(criterion.option("k", 1)), 1 - limit
        by_row, lost = rows(values, criterion), 1.0 / k
        if k >= by_row.shape[1]:
            return None
        largest = by_row.topk(k + 1, -1)
        first, second = rows(places, criterion).gather(1, largest.indices[:, k - 1 :]).unbind(1)
        apart = largest.values[:, k - 1].double() - largest.values[:, k].double()
    count, known = apart.numel(), apart.isfinite() & (apart != 0)
    if not bool(known.any()):
        return None
    first, second = first[known], second[known] if second is not None else None
    margins = Margins(first, second, apart[known].sign(), apart[known].abs(), lost * first.numel() / count, limit)
    return margins if margins.flips(math.inf) > limit else None


def _is_on_grid(x: torch.Tensor, dtype: torch.dtype | None) -> bool:
    """Whether every entry is exactly representable in a format."""
    return dtype is not None and bool((x.to(dtype).to(x.dtype) == x).all())
