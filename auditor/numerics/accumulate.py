"""Sums that CUDA's kernels form by atomic operations in the format: each one rounds the running total.

CUDA leaves the order of atomic operations open. Here it is the order of the terms, one term after the other, as
`numpy.ufunc.at` applies them; ml_dtypes is numpy's bfloat16.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import torch
from torch import Tensor


def add_in_order(totals: Tensor, index: Tensor, terms: Tensor) -> Tensor:
    """Add each row of `terms` to the row of `totals` that `index` names, and round every sum.

    Shapes: totals [t, *], index [n] of int64, terms [n, *] -> [t, *]. Dtypes: float16 or bfloat16, all the same.
    """
    return _apply_in_order(np.add, totals, index, terms)


def multiply_in_order(totals: Tensor, index: Tensor, terms: Tensor) -> Tensor:
    """Like `add_in_order`, with products."""
    return _apply_in_order(np.multiply, totals, index, terms)


def _apply_in_order(operation: np.ufunc, totals: Tensor, index: Tensor, terms: Tensor) -> Tensor:
    result = totals.clone(memory_format=torch.contiguous_format)
    with np.errstate(over="ignore", invalid="ignore"):
        operation.at(_as_array(result), index.numpy(), _as_array(terms.contiguous()))
    return result


def _as_array(x: Tensor) -> np.ndarray:
    """A numpy view of a contiguous float16 or bfloat16 tensor."""
    kind = np.float16 if x.dtype is torch.float16 else ml_dtypes.bfloat16
    bits: np.ndarray = x.detach().view(torch.int16).numpy()
    return bits.view(kind)
