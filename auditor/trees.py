"""The tensors among an operation's arguments, without the price of a general traversal for what nearly all are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

_LEAVES = (bool, int, float, str, complex, torch.dtype, torch.device, torch.layout, torch.memory_format)


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """The tensors among the leaves of `tree`, in order."""
    found: list[torch.Tensor] = []
    _collect(tree, found)
    return found


def over_tensors(function: Callable[[torch.Tensor], Any], tree: Any) -> Any:
    """`tree` with `function` of every tensor in its place."""
    if isinstance(tree, torch.Tensor):
        return function(tree)
    if type(tree) in (tuple, list):
        return type(tree)([over_tensors(function, item) for item in tree])
    if type(tree) is dict:
        return {key: over_tensors(function, item) for key, item in tree.items()}
    if tree is None or isinstance(tree, _LEAVES):
        return tree
    return pytree.tree_map_only(torch.Tensor, function, tree)


def _collect(tree: Any, found: list[torch.Tensor]) -> None:
    if isinstance(tree, torch.Tensor):
        found.append(tree)
    elif type(tree) in (tuple, list):
        for item in tree:
            _collect(item, found)
    elif type(tree) is dict:
        for item in tree.values():
            _collect(item, found)
    elif tree is not None and not isinstance(tree, _LEAVES):
        found += [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
