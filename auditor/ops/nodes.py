"""What the stages ask of a torch.fx node, with the types that they rely on."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from ..trees import tensors_in

# The same entries under another shape: rounding them is all a format can do.
VIEWS = frozenset(
    "view reshape _unsafe_view transpose permute t unsqueeze squeeze alias detach flatten unflatten clone contiguous "
    "numpy_T movedim moveaxis swapaxes swapdims mT mH adjoint ravel view_as reshape_as dropout".split()
)


def target_of(n: fx.Node) -> Callable[..., Any]:
    """The operation of a call_function node."""
    assert callable(n.target)
    return n.target


def overload_of(target: Any) -> Any:
    """The operation that a node's target is, or stands for: a random operation is kept together with its draw."""
    return getattr(target, "stands_for", target)


def op_name(target: Any) -> str:
    """`aten.softmax.int` for an operator overload, the function's name for anything else (`getitem`)."""
    target = overload_of(target)
    if isinstance(target, torch._ops.OpOverload):
        return str(target)
    return str(getattr(target, "__name__", target))


def packet_name(target: Callable[..., Any]) -> str:
    """`softmax` for `aten.softmax.int`; in-place variants keep their underscore."""
    target = overload_of(target)
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.name.split("::")[1]
    return str(getattr(target, "__name__", target))


def viewed(n: fx.Node) -> fx.Node | None:
    """The node whose entries `n` gives another shape, or whose first result it picks, if that is all it does."""
    source = n.args[0] if n.op == "call_function" and n.args else None
    if not isinstance(source, fx.Node):
        return None
    first = n.target is operator.getitem and n.args[1] == 0
    return source if first or packet_name(target_of(n)) in VIEWS else None


def mutates(target: object) -> bool:
    """Whether the operation writes to one of its arguments."""
    return isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable


def settled(target: object, value: Any) -> Any:
    """The value, once it is there: a functional collective returns tensors that are still being filled."""
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "_c10d_functional":
        return value
    wait = torch.ops._c10d_functional.wait_tensor.default
    return pytree.tree_map_only(torch.Tensor, wait, value)


def tensors_of(value: Any) -> list[torch.Tensor]:
    """The tensors among the leaves of a node's value."""
    return tensors_in(value)
