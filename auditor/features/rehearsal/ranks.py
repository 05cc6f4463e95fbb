"""Simulated ranks of data-parallel training: the rows of a batch for each rank, and the mean of the ranks' gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...errors import LoadError
from ...numerics.entries import over_tensors, tensors_in
from ...numerics.formats import dtype_of


def shard(batch: Any, rank: int, ranks: int) -> Any:
    """The rows of a batch that one rank gets: every tensor with as many rows as the first one is split.

    Raises: LoadError(slug="bad-step") if the batch has too few rows.
    """
    rows = next((len(x) for x in tensors_in(batch) if x.dim()), 0)
    if rows < ranks:
        raise LoadError(f"a batch of {rows} rows cannot be split over {ranks} ranks: give larger batches", "bad-step")
    return over_tensors(lambda x: x.tensor_split(ranks)[rank] if x.dim() and len(x) == rows else x, batch)


def mean_gradient(gradients: Sequence[torch.Tensor], stored: str, summed: str) -> torch.Tensor:
    """The mean of the ranks' gradients, in FP32.

    stored: the format to which each rank rounds its gradient. summed: the format of the sum, in which the gradients,
    divided by the number of ranks first, are added in a ring: each rank rounds the sum that it passes on.
    """
    count, dtype = len(gradients), dtype_of(summed)
    parts = [(x.to(dtype_of(stored)).to(dtype) / count) for x in gradients]
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total.float()
