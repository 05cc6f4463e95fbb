"""Helpers for the tensors in an operation's arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """The tensors among the leaves of `tree`, in order."""
    if isinstance(tree, torch.Tensor):  # most results; the general way takes many times as long
        return [tree]
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def over_tensors(function: Callable[[torch.Tensor], Any], tree: Any) -> Any:
    """Apply `function` to every tensor in `tree`."""
    return function(tree) if isinstance(tree, torch.Tensor) else pytree.tree_map_only(torch.Tensor, function, tree)
