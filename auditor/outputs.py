"""What counts as a model's output: the tensors in whatever the forward returns, in a fixed order."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from .records import Batch


def forward(model: nn.Module, batch: Batch) -> Any:
    """What the model answers, run on copies of its inputs and buffers: some models write into both."""
    args, kwargs = pytree.tree_map_only(torch.Tensor, torch.Tensor.clone, batch)
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    return torch.func.functional_call(model, buffers, args, kwargs)


def tensor_outputs(output: Any) -> list[torch.Tensor]:
    """Tensor leaves of `output`; objects that torch cannot flatten (key-value caches) are left out."""
    return [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor)]
