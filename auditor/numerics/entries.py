"""The tensors in arguments and results, and the entries of a tensor as a plain tensor, for every layout and view."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.utils import _pytree as pytree

T = TypeVar("T")

ON_GPU = 1 << 24
"""Number of entries that a GPU processes at once: a compromise between memory and speed."""

_BY_ROWS = (torch.sparse_csr, torch.sparse_bsr)


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """The tensors among the leaves of `tree`, in order."""
    if isinstance(tree, torch.Tensor):
        return [tree]
    collected = list[torch.Tensor]()
    _collect(tree, collected)
    return collected


_PLAIN = (int, float, bool, str, type(None), torch.dtype)
"""Types of leaves that occur as arguments of operations."""


def _collect(tree: Any, collected: list[torch.Tensor]) -> None:
    """Append the tensors in `tree`. Tuples, lists and dicts are walked here, since pytree takes many times as long."""
    kind = type(tree)
    if isinstance(tree, torch.Tensor):
        collected.append(tree)
    elif kind is tuple or kind is list:
        for item in tree:
            _collect(item, collected)
    elif kind is dict:
        for item in tree.values():
            _collect(item, collected)
    elif kind not in _PLAIN:
        collected += [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def version_of(x: torch.Tensor) -> int:
    """How often a tensor was changed in place; 0 for inference tensors, of which torch does not count it."""
    return 0 if x.is_inference() else x._version


def over_tensors(function: Callable[[torch.Tensor], Any], tree: T) -> T:
    """Apply `function` to every tensor in `tree`."""
    kind = type(tree)
    if isinstance(tree, torch.Tensor):
        return function(tree)  # type: ignore[no-any-return]
    if kind is tuple or kind is list:
        return kind([over_tensors(function, item) for item in tree])  # type: ignore[attr-defined, call-arg, no-any-return]
    if kind is dict:
        return {key: over_tensors(function, item) for key, item in tree.items()}  # type: ignore[attr-defined, return-value]
    return tree if kind in _PLAIN else pytree.tree_map_only(torch.Tensor, function, tree)


def entries(x: torch.Tensor) -> torch.Tensor:
    """The entries of `x` as a real, strided tensor (`x` itself if possible); FP8 becomes float32.

    Shapes: [*] -> [*]; complex numbers become pairs, [*, 2]. A sparse tensor gives its stored entries; a nested tensor
    gives the entries of all parts, concatenated.
    """
    if x.is_nested:
        parts = [part.reshape(-1) for part in x.unbind()]
        x = torch.cat(parts) if parts else x.new_zeros(0)
    elif x.layout is torch.sparse_coo:
        x = x.coalesce().values()
    elif x.layout is not torch.strided:
        x = x.values()
    x = x.resolve_neg()
    if x.is_complex():
        return torch.view_as_real(x.resolve_conj())
    return x.float() if x.is_floating_point() and x.itemsize == 1 else x  # FP8 has no arithmetic


def is_plain(x: torch.Tensor) -> bool:
    """Whether the tensor is strided and not nested."""
    return x.layout is torch.strided and not x.is_nested


def is_number(x: torch.Tensor) -> bool:
    """Whether the entries are real or complex floating-point numbers; False for a meta tensor."""
    return (x.is_floating_point() or x.is_complex()) and x.device.type != "meta"


def dense(x: torch.Tensor) -> torch.Tensor:
    """Convert a sparse tensor to a dense one; other tensors are returned unchanged."""
    return x if is_plain(x) else x.to_dense()


def places(x: torch.Tensor) -> list[torch.Tensor]:
    """The index tensors of a sparse tensor; [] for other tensors."""
    if is_plain(x) or x.is_nested:
        return []
    if x.layout is torch.sparse_coo:
        return [x.coalesce().indices()]
    return [x.crow_indices(), x.col_indices()] if x.layout in _BY_ROWS else [x.ccol_indices(), x.row_indices()]


def extent(x: torch.Tensor) -> tuple[tuple[int, ...], ...]:
    """Shapes that must be equal to compare two tensors entry by entry; for a nested tensor, of all its parts."""
    if x.is_nested:
        return tuple(tuple(part.shape) for part in x.unbind())
    return (tuple(x.shape),) if is_plain(x) else (tuple(x.shape), tuple(entries(x).shape))


def finite(x: torch.Tensor) -> torch.Tensor:
    """Replace non-finite entries of `x` by zero."""
    return torch.nan_to_num(x, nan=0.0, posinf=0.0, neginf=0.0)


def all_finite(x: torch.Tensor) -> bool:
    """Whether no entry is Inf or NaN; one pass over the entries, about twenty times as fast as `isfinite().all()`."""
    x = entries(x)
    return not x.numel() or bool(torch.stack(torch.aminmax(x)).isfinite().all())
