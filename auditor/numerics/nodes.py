"""Accessors for torch.fx nodes: operation, shapes, arguments, and inputs."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import fx

from .devices import target_type
from .entries import over_tensors
from .entries import tensors_in as tensors_in  # re-exported for code that reads nodes
from .operations import Operation, operation

_TORCHS_OWN = ("aten", "prims", "_c10d_functional")
_COLLECTIVES = ("_c10d_functional", "_c10d_functional_autograd", "c10d")
_INDEXED_ADDITIONS = ("index_add", "scatter_add")
"""Operations that always add terms to entries that an index names; others do so if an argument asks for it."""
_WRITTEN = ("source", "values", "src")
"""Names of arguments whose values an operation writes into its argument `self`."""


def target_of(n: fx.Node) -> Callable[..., Any]:
    """The callable that a call_function node calls."""
    assert callable(n.target)
    return n.target


def overload_of(target: Any) -> Any:
    """The torch operation of a node's target, without a wrapper such as PinnedDraw, which fixes random numbers."""
    return getattr(target, "stands_for", target)


def op_name(target: Any) -> str:
    """The name of an operator overload, such as `aten.softmax.int`, or of another function, such as `getitem`."""
    target = overload_of(target)
    if isinstance(target, torch._ops.OpOverload):
        return str(target)
    return str(getattr(target, "__name__", target))


def overload_named(op: str) -> Any:
    """The operator overload with this name: `aten.softmax.int` -> torch.ops.aten.softmax.int."""
    namespace, packet, overload = op.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet), overload)


def operation_of(target: Any) -> Operation:
    """The table row (an Operation) of the operation that a node's target calls."""
    return _operation_of(target, target_type())


@cache
def _operation_of(target: Any, device_type: str) -> Operation:
    return operation(op_name(target))


def op_of(node: fx.Node) -> str:
    """The operation's name as rules write it: `aten.add.Tensor`, `getitem`, or `placeholder` for inputs and weights."""
    return op_name(node.target) if node.op == "call_function" else "placeholder"


def row_of(node: fx.Node) -> Operation:
    """The table row (an Operation) of a node's operation; an empty one for placeholders and the output."""
    return operation_of(overload_of(node.target)) if node.op == "call_function" else operation("placeholder")


def is_torchs_own(target: Any) -> bool:
    """Whether the operation belongs to torch, not to a library or the user."""
    return getattr(overload_of(target), "namespace", "aten") in _TORCHS_OWN


def is_collective(op: str) -> bool:
    """Whether the operation communicates with other processes."""
    return op.partition(".")[0] in _COLLECTIVES


def mutates(target: object) -> bool:
    """Whether the operation writes to one of its arguments."""
    return isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable


def to_device(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy to another device in the same dtype: a separate graph operation, since torch's would look like a cast."""
    return x.to(device)


def wait_for_result(target: object, value: Any) -> Any:
    """Wait until a collective's result is complete; zero uninitialized memory, so that every run has the same values.

    A functional collective returns tensors that are still being filled.
    """
    if not isinstance(target, torch._ops.OpOverload):
        return value
    if target.namespace == "_c10d_functional":
        return over_tensors(torch.ops._c10d_functional.wait_tensor.default, value)
    return over_tensors(torch.zeros_like, value) if operation_of(target).uninitialized else value


def view_source(n: fx.Node) -> fx.Node | None:
    """The input of which `n` is a reshape, a permutation or the first item; None for other nodes."""
    source = n.args[0] if n.op == "call_function" and n.args else None
    if not isinstance(source, fx.Node):
        return None
    first = n.target is operator.getitem and n.args[1] == 0
    return source if first or row_of(n).entries in ("same", "turned") else None


def source(node: fx.Node, stops: Callable[[fx.Node], bool] = lambda _: False) -> fx.Node:
    """Follow `node` upstream through reshapes, selections, dropout and casts; returns the first other node, or the
    first for which `stops` is true."""
    while row_of(node).transparent and node.all_input_nodes and not stops(node):
        node = node.all_input_nodes[0]
    return node


def readers(node: fx.Node) -> Iterator[fx.Node]:
    """Operations that read the values of `node`, directly or through reshapes, selections, dropout and casts."""
    for user in node.users:
        row = row_of(user)
        if user.op == "call_function" and not row.assertion:
            if row.transparent:
                yield from readers(user)
            else:
                yield user


def _first(node: Any) -> Any:
    """The node's first recorded result, usually a meta tensor; None if no result was recorded."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return value[0] if isinstance(value, (tuple, list)) and value else value


def shape(node: Any) -> tuple[int, ...]:
    """Shape of the node's first tensor result.

    Raises: ValueError if no static shape was recorded, so that no formula applies.
    """
    sizes = getattr(_first(node), "shape", None)
    if sizes is None or not all(isinstance(size, int) for size in sizes):
        raise ValueError(f"{node} has no static shape")
    return tuple(sizes)


def dtype(node: fx.Node) -> torch.dtype | None:
    """Dtype of the node's first tensor result; None for a node without tensor results."""
    result = getattr(_first(node), "dtype", None)
    return result if isinstance(result, torch.dtype) else None


def arguments_of(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any], defaults: bool = False) -> dict[str, Any]:
    """A call's arguments by their schema names; `kwargs` if no schema exists. defaults: include default values."""
    op = overload_of(target)
    given = dict(zip(_argument_names(op), args, strict=False)) | dict(kwargs)
    return _default_values(op) | given if defaults else given


def arguments(node: fx.Node) -> dict[str, Any]:
    """{name: argument} of a node's call, without defaults."""
    return arguments_of(node.target, node.args, node.kwargs)


def arguments_with_defaults(node: fx.Node) -> dict[str, Any]:
    """{name: argument} of a node's call, with the schema's defaults."""
    return arguments_of(node.target, node.args, node.kwargs, defaults=True)


def adds_by_index(node: fx.Node) -> bool:
    """Whether an operation adds terms to entries that an index names, such as `index_add`."""
    if node.op != "call_function":
        return False
    given = arguments_with_defaults(node)
    adds = given["accumulate"] if "accumulate" in given else given.get("reduce") in ("sum", "add")
    return bool(adds) or row_of(node).packet in _INDEXED_ADDITIONS


def written_argument(node: fx.Node) -> str | None:
    """The name of the argument whose values an operation writes into its argument `self`, such as `source` of
    `index_add`; None for other operations."""
    given = arguments(node)
    return next((name for name in _WRITTEN if name in given and "self" in given), None)


def argument_at(node: fx.Node, position: int) -> Any:
    """The argument at a position of the op's schema, positional or by keyword; None if absent."""
    if position < len(node.args):
        return node.args[position]
    names = _argument_names(overload_of(node.target))
    return node.kwargs.get(names[position]) if position < len(names) else None


@cache
def _argument_names(op: Any) -> tuple[str, ...]:
    return tuple(argument.name for argument in op._schema.arguments) if isinstance(op, torch._ops.OpOverload) else ()


@cache
def _default_values(op: Any) -> dict[str, Any]:
    if not isinstance(op, torch._ops.OpOverload):
        return {}
    return {a.name: a.default_value for a in op._schema.arguments if a.has_default_value()}
