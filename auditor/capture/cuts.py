"""Where gradients end on a tape, as they did in the run: at `detach`, and behind what ran under `no_grad`."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ..numerics.nodes import tensors_of

_KEY = "gradient"


def carry(node: fx.Node, value: Any) -> None:
    """Notes whether a replay of the node would hand gradients on to a parameter."""
    if node.op == "placeholder":
        node.meta[_KEY] = isinstance(value, torch.nn.Parameter) and value.requires_grad
    else:
        reached = any(source.meta[_KEY] for source in node.all_input_nodes)
        node.meta[_KEY] = reached and any(_differentiable(x) for x in tensors_of(value))


def ends(node: fx.Node, x: torch.Tensor) -> bool:
    """Whether a tensor that is read hands on no gradient, though its node would.

    Inside `no_grad` nothing is said: an autograd.Function runs its forward there, and its result has a gradient.
    """
    return torch.is_grad_enabled() and bool(node.meta[_KEY]) and _differentiable(x) and not x.requires_grad


def _differentiable(x: torch.Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()
