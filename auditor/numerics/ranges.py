"""Magnitudes of a tensor: extremes and a histogram over powers of two."""

from __future__ import annotations

import torch

from ..records import NodeRange


def range_of(x: torch.Tensor) -> NodeRange:
    """Magnitudes of `x` (shape [*], any float). Non-finite entries are left out; empty and all-zero tensors give 0."""
    magnitude = x.detach().float().abs()
    finite = magnitude[torch.isfinite(magnitude)]
    nonzero = finite[finite > 0]
    if nonzero.numel() == 0:
        return NodeRange(0.0, 0.0, 1.0 if finite.numel() else 0.0, {})
    low, high = torch.aminmax(nonzero)
    exponents = torch.frexp(nonzero)[1] - 1  # frexp's mantissa lies in [0.5, 1)
    offset = int(exponents.min())
    counts = torch.bincount((exponents - offset).long())
    return NodeRange(
        max_abs=float(high),
        min_abs=float(low),
        zeros=1 - nonzero.numel() / finite.numel(),
        exponents={offset + index: int(count) for index, count in enumerate(counts.tolist()) if count},
    )
