"""Gradients of two ways to compute the same, held against each other."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def same_gradients(
    ours: Sequence[Tensor], theirs: Sequence[Tensor], results: tuple[Tensor, Tensor], weights: Tensor
) -> None:
    """Assert that backward from `results`, weighted, gives the leaves of both the same gradients."""
    for result in results:
        result.backward(weights)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-4, atol=1e-3)
