"""Sketches of tensors: a few numbers, from which the norm of a difference is estimated."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import torch

from ...numerics.entries import entries

BUCKETS = 64
"""Numbers in a sketch: the norm of a difference of two tensors is that of their sketches, to about 20 %."""


def sketch(x: Any) -> list[float]:
    """Sums of parts of a tensor's entries [n], with random signs: [BUCKETS]."""
    flat = entries(x.detach()).flatten().double()
    signs = _signs(flat.numel())
    padded = torch.nn.functional.pad(flat, (0, len(signs) - flat.numel()))
    sums: list[float] = (padded * signs).view(-1, BUCKETS).sum(0).tolist()
    return sums


def apart(exact: list[float], other: list[float]) -> float:
    """Relative L2 difference of two tensors from their sketches; inf if they have no difference, as with NaN."""
    if len(exact) != len(other):
        return math.inf
    size = math.hypot(*exact)
    difference = math.hypot(*(a - b for a, b in zip(exact, other, strict=True)))
    if not difference:
        return 0.0
    error = difference / size if size else math.inf
    return error if math.isfinite(error) else math.inf


@lru_cache(64)
def _signs(count: int) -> torch.Tensor:
    """Random signs for `count` entries, padded to whole rows of BUCKETS."""
    generator = torch.Generator().manual_seed(count)
    padded = max(math.ceil(count / BUCKETS), 1) * BUCKETS
    return torch.randint(2, (padded,), generator=generator, dtype=torch.int8) * 2 - 1
