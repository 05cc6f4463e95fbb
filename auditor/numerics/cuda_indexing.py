"""CUDA kernels that add up entries by indices: by atomic additions in the format, or sorted."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .accumulate import add_in_order, multiply_in_order
from .cuda_exceptions import Given, exception

_Apply = Callable[[Tensor, Tensor, Tensor], Tensor]

_SORTED_AT_ONCE = 32
"""Elements per index up to which the sorted kernel of index_put adds all duplicates in FP32 and rounds once."""

_EMBEDDING_FEW, _EMBEDDING_CHUNK = 3072, 32
"""Number of indices up to which embedding's backward adds by chunks, and the positions of a chunk."""


@exception("scatter_add")
def _scatter_add(given: Given, dtype: torch.dtype) -> Tensor:
    return _scattered(given["self"], given["dim"], given["index"], given["src"], add_in_order)


@exception("scatter_reduce")
def _scatter_reduce(given: Given, dtype: torch.dtype) -> Tensor:
    """Sums and products step by step; a mean divides by a count that is kept in the format."""
    totals, dim, index, terms = given["self"], given["dim"], given["index"], given["src"]
    reduce = given["reduce"]
    if reduce in ("amax", "amin"):
        return _largest(given, dtype)
    apply = multiply_in_order if reduce in ("prod", "multiply") else add_in_order
    if not given.get("include_self", True):
        neutral = 1.0 if apply is multiply_in_order else 0.0
        totals = totals.float().scatter(dim, index, neutral).to(dtype)
    result = _scattered(totals, dim, index, terms, apply)
    if reduce != "mean":
        return result
    counts = torch.ones_like(totals)
    if not given.get("include_self", True):
        counts = counts.float().scatter(dim, index, 0.0).to(dtype)
    counts = _scattered(counts, dim, index, torch.ones_like(terms), add_in_order).float()
    return (result.float() / counts.masked_fill(counts == 0, 1)).to(dtype)


def _largest(given: Given, dtype: torch.dtype) -> Tensor:
    wide = {name: value.float() if name in ("self", "src") else value for name, value in given.items()}
    keep = wide.pop("include_self", True)
    return torch.scatter_reduce(
        wide["self"], wide["dim"], wide["index"], wide["src"], wide["reduce"], include_self=keep
    ).to(dtype)


@exception("index_add")
def _index_add(given: Given, dtype: torch.dtype) -> Tensor:
    """Rows of `source`, times alpha if it is not 1, are rounded and added one after the other."""
    totals, dim, terms = given["self"], given["dim"], given["source"]
    if given["alpha"] != 1:
        alpha = float(torch.tensor(given["alpha"]).to(dtype))
        terms = (terms.float() * alpha).to(dtype)
    index = given["index"].reshape(-1)
    if not totals.dim():
        return add_in_order(totals.reshape(1), index, terms.reshape(-1)).reshape(())
    rows = add_in_order(totals.movedim(dim, 0), index, _rows(terms, dim))
    return rows.movedim(0, dim)


def _rows(x: Tensor, dim: int) -> Tensor:
    return x.movedim(dim, 0) if x.dim() else x.reshape(1)


@exception("put")
def _put(given: Given, dtype: torch.dtype) -> Tensor:
    totals, index, terms = given["self"], given["index"].reshape(-1), given["source"].reshape(-1)
    flat = totals.reshape(-1)
    if not given["accumulate"]:
        result = flat.float().put(index, terms.float()).to(dtype)
    else:
        result = add_in_order(flat, torch.remainder(index, flat.numel()), terms)
    return result.reshape(totals.shape)


@exception("index_put")
def _index_put(given: Given, dtype: torch.dtype) -> Tensor:
    """Without accumulation nothing is added. With it, duplicates are sorted; slices of up to 32 elements add up in FP32
    and round once, longer ones round after every duplicate."""
    totals, indices, values = given["self"], given["indices"], given["values"]
    accumulate = given.get("accumulate", False)
    if not accumulate or _elements_per_index(totals, indices) <= _SORTED_AT_ONCE:
        return torch.ops.aten.index_put(totals.float(), indices, values.float(), accumulate).to(dtype)
    places = torch.arange(totals.numel()).reshape(totals.shape)
    targets = torch.ops.aten.index(places, indices)
    terms = values.expand(targets.shape).reshape(-1)
    order = torch.argsort(targets.reshape(-1), stable=True)
    flat = add_in_order(totals.reshape(-1), targets.reshape(-1)[order], terms[order])
    return flat.reshape(totals.shape)


def _elements_per_index(x: Tensor, indices: Sequence[Tensor | None]) -> int:
    """Number of contiguous elements that one index addresses: the dimensions after the last indexed one."""
    used = 0
    for at, index in enumerate(indices):
        if index is not None:
            used = at + (index.dim() if index.dtype in (torch.bool, torch.uint8) else 1)
    return math.prod(x.shape[used:])


@exception("embedding_dense_backward")
def _embedding_dense_backward(given: Given, dtype: torch.dtype) -> Tensor:
    """Up to 3,072 indices: 32 positions at a time add up in FP32 per token, and each partial sum is rounded and added in
    the format. More indices: FP32 sums, rounded once."""
    grad, index, count = given["grad_output"], given["indices"].reshape(-1), given["num_weights"]
    rows = grad.reshape(len(index), -1)
    if len(index) > _EMBEDDING_FEW or given["scale_grad_by_freq"]:
        return torch.ops.aten.embedding_dense_backward(
            grad.float(), given["indices"], count, given["padding_idx"], given["scale_grad_by_freq"]
        ).to(dtype)
    chunk = torch.arange(len(index)) // _EMBEDDING_CHUNK
    keys, group = torch.unique(chunk * count + index, return_inverse=True)  # sorted: by chunk, then by token
    partial = torch.zeros(len(keys), rows.shape[1]).index_add(0, group, rows.float())
    tokens = keys % count
    kept = tokens != given["padding_idx"]
    totals = torch.zeros(count, rows.shape[1], dtype=dtype)
    return add_in_order(totals, tokens[kept], partial[kept].to(dtype))


def _scattered(totals: Tensor, dim: int, index: Tensor, terms: Tensor, apply: _Apply) -> Tensor:
    """Combine each term with the entry of `totals` that `index` names along `dim`. Shapes: as torch.scatter_add."""
    if not totals.dim():
        scattered = _scattered(totals.reshape(1), 0, index.reshape(-1), terms.reshape(-1), apply)
        return scattered.reshape(())
    if not index.numel():
        return totals.clone()
    dim = dim % totals.dim()
    read = tuple(slice(size) for size in index.shape)
    terms = terms[read]
    if _repeats_rows(index, dim):  # [n, *]: one index for each row
        row_index = index
        if index.dim() > 1:
            row_index = index.movedim(dim, 0).flatten(1)[:, 0]
        rows = totals.movedim(dim, 0)
        term_rows = terms.movedim(dim, 0)
        if rows.shape[1:] == term_rows.shape[1:]:
            return apply(rows, row_index, term_rows).movedim(0, dim)
    places = torch.arange(totals.numel()).reshape(totals.shape)  # of each entry in the flat tensor
    reached = [slice(size) for size in index.shape]
    reached[dim] = slice(None)
    targets = places[tuple(reached)].gather(dim, index)
    combined = apply(totals.reshape(-1), targets.reshape(-1), terms.reshape(-1))
    return combined.reshape(totals.shape)


def _repeats_rows(index: Tensor, dim: int) -> bool:
    """Whether an index tensor was expanded along every dimension but `dim`."""
    return all(at == dim or size == 1 or index.stride(at) == 0 for at, size in enumerate(index.shape))
