"""What counts as a model's output: the tensors in whatever the forward returns, in a fixed order."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree


def tensor_outputs(output: Any) -> list[torch.Tensor]:
    """Tensor leaves of `output`; objects that torch cannot flatten (key-value caches) are left out."""
    return [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor)]
