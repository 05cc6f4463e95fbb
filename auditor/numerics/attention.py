"""Emulates CUDA's fused attention: it rounds the exponentials of a row before they multiply the values.

Scores, maximum, exponentials and the sum of a row are FP32; the exponentials are rounded to the format for the second
product, which sums in FP32; the result is divided by the FP32 sum and rounded once. In the backward the gradients of the
scores are rounded before their products. Sources: the kernels of flash-attention and of
aten/src/ATen/native/transformers/cuda/mem_eff_attention. What a kernel rounds from block to block is the same for every
block size, except that exponentials are taken against the largest score so far.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .cuda_exceptions import Given

_ROWS = 1024
"""Query rows that are computed at once, to limit memory."""


class _RoundedValues(torch.autograd.Function):
    """Rounds float32 values to a format; gradients pass unchanged."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype) -> Tensor:
        return x.to(dtype).float()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return gradient, None


class _RoundedGradients(torch.autograd.Function):
    """Passes float32 values unchanged; rounds their gradients to a format."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.dtype = dtype
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return gradient.to(ctx.dtype).float(), None


def fused_attention(given: Given, dtype: torch.dtype) -> Tensor:
    """`scaled_dot_product_attention` without dropout, with its arguments by name.

    Shapes: query [*, l, e], key [*, s, e], value [*, s, v], attn_mask broadcastable to [*, l, s] -> [*, l, v].
    """
    query = given["query"].float()
    key = given["key"].float()
    value = given["value"].float()
    if given.get("enable_gqa") and key.shape[-3] != query.shape[-3]:
        groups = query.shape[-3] // key.shape[-3]
        key = key.repeat_interleave(groups, -3)
        value = value.repeat_interleave(groups, -3)
    scale = given.get("scale")
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else float(scale)
    length = query.shape[-2]
    mask = _mask(given, length, key.shape[-2])
    keys = key.transpose(-2, -1)
    parts = list[Tensor]()
    for start in range(0, max(length, 1), _ROWS):
        rows = slice(start, start + _ROWS)
        exact = factor * (query[..., rows, :] @ keys)
        scores = _RoundedGradients.apply(exact, dtype)  # type: ignore[no-untyped-call]
        if mask is not None:
            is_same_for_rows = mask.shape[-2] <= 1
            scores = scores + (mask if is_same_for_rows else mask[..., rows, :])
        parts.append(_weighted(scores, value, dtype))
    return torch.cat(parts, -2).to(dtype)


def _mask(given: Given, queries: int, keys: int) -> Tensor | None:
    """The mask that is added to the scores, in FP32."""
    mask: Tensor | None = given.get("attn_mask")
    if given.get("is_causal"):
        mask = torch.ones(queries, keys, dtype=torch.bool).tril()
    if mask is not None and not mask.is_floating_point() and mask.dtype is not torch.bool:
        raise TypeError(f"attn_mask has dtype {mask.dtype}: it must be bool or the query's dtype")
    if mask is not None and mask.dtype is torch.bool:
        return torch.zeros(mask.shape).masked_fill(mask.logical_not(), -math.inf)
    return None if mask is None else mask.float().reshape((1,) * (2 - mask.dim()) + tuple(mask.shape))


def _weighted(scores: Tensor, value: Tensor, dtype: torch.dtype) -> Tensor:
    """Softmax-weighted values of some rows. Rows without any key are zero. Shapes: [*, l, s], [*, s, v] -> [*, l, v]."""
    if not scores.shape[-1]:
        return scores @ value
    largest = scores.detach().amax(-1, keepdim=True)
    exponentials = torch.exp(scores - largest.masked_fill(largest == -math.inf, 0))
    total = exponentials.sum(-1, keepdim=True)
    rounded = _RoundedValues.apply(exponentials, dtype)  # type: ignore[no-untyped-call]
    return (rounded @ value) / torch.where(total == 0, 1.0, total)
