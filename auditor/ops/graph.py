"""Reading the captured graph: names of ops, shapes, and which ops pass values through unchanged."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import torch
from torch import fx

from .nodes import op_name, overload_of

SHAPE_ONLY = frozenset(
    [
        "getitem",
        "aten.view",
        "aten.reshape",
        "aten._unsafe_view",
        "aten._reshape_copy",
        "aten.view_copy",
        "aten.transpose",
        "aten.permute",
        "aten.t",
        "aten.mT",
        "aten.mH",
        "aten.adjoint",
        "aten.numpy_T",
        "aten.matrix_H",
        "aten.swapaxes",
        "aten.swapdims",
        "aten.movedim",
        "aten.moveaxis",
        "aten.expand",
        "aten.expand_as",
        "aten.broadcast_to",
        "aten.broadcast_tensors",
        "aten.squeeze",
        "aten.unsqueeze",
        "aten.flatten",
        "aten.unflatten",
        "aten.ravel",
        "aten.select",
        "aten.slice",
        "aten.narrow",
        "aten.split",
        "aten.split_with_sizes",
        "aten.tensor_split",
        "aten.chunk",
        "aten.unbind",
        "aten.clone",
        "aten.contiguous",
        "aten.alias",
        "aten.detach",
        "aten.lift_fresh_copy",
        "aten.view_as",
        "aten.repeat",
        "aten.tile",
        "aten.unfold",
        "aten.diagonal",
        "aten.as_strided",
        "aten.flip",
        "aten.roll",
        "aten.pixel_shuffle",
        "aten.pixel_unshuffle",
        "aten.channel_shuffle",
        "aten.dropout",
        "aten.native_dropout",
        "aten.feature_dropout",
        "aten.index_select",
        "_c10d_functional.wait_tensor",
    ]
)
"""Ops whose output holds only values of their first input (eval-mode dropout among them)."""

CASTS = frozenset(
    {
        "aten.to",
        "aten._to_copy",
        "aten.type_as",
        "prims.convert_element_type",
        "aten._autocast_to_full_precision",
        "aten._autocast_to_reduced_precision",
    }
)

PRODUCTS = frozenset(
    {
        "aten.linear",
        "aten.conv1d",
        "aten.conv2d",
        "aten.conv3d",
        "aten.convolution",
        "aten.conv_transpose1d",
        "aten.conv_transpose2d",
        "aten.conv_transpose3d",
        "aten.matmul",
        "aten.mm",
        "aten.bmm",
        "aten.mv",
        "aten.addmm",
        "aten.addmv",
        "aten.addbmm",
        "aten.baddbmm",
        "aten.einsum",
        "aten.linalg_multi_dot",
        "aten.scaled_dot_product_attention",
    }
)
"""Matrix products and convolutions: what autocast lowers, whatever the dtype of its inputs."""

ASSERTIONS = frozenset({"aten._assert_tensor_metadata", "aten._assert_async", "aten._assert_scalar"})


@lru_cache(maxsize=4096)
def packet(op: str) -> str:
    """`aten.softmax.int` -> `aten.softmax`; names without an overload (`getitem`) come back as they are."""
    op = "getitem" if op.endswith("getitem") else op
    return ".".join(op.split(".")[:2])


def operation(op: str) -> str:
    """The op without namespace and overload, as messages call it: `aten.linalg_svd.default` -> `linalg_svd`."""
    return packet(op).rpartition(".")[2]


def is_transparent(op: str) -> bool:
    """Whether `op` only reshapes, selects or casts, so that a pattern may look through it."""
    return packet(op) in SHAPE_ONLY or packet(op) in CASTS


def op_of(node: fx.Node) -> str:
    """The name rules use: `aten.add.Tensor`, `getitem`, or `placeholder` for what is no operation."""
    if node.op != "call_function":
        return "placeholder"
    return op_name(node.target)


def source(node: fx.Node) -> fx.Node:
    """The node whose values `node` holds, looking up through reshapes, selections and casts."""
    while node.op == "call_function" and is_transparent(op_of(node)) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def readers(node: fx.Node) -> Iterator[fx.Node]:
    """Operations that read the values of `node`, looking down through reshapes, selections and casts."""
    for user in node.users:
        op = op_of(user)
        if user.op == "call_function" and packet(op) not in ASSERTIONS:
            if is_transparent(op):
                yield from readers(user)
            else:
                yield user


def value(node: fx.Node) -> Any:
    """Shape and dtype of what the node gave when it was recorded: a tensor without entries, or a tuple of them; None if none."""
    return node.meta.get("val")


def shape(node: Any) -> tuple[int, ...]:
    """Shape of the node's (first) tensor output.

    Raises: ValueError where no shape was recorded; formulas on shapes then do not apply.
    """
    held = value(node) if isinstance(node, fx.Node) else None
    held = held[0] if isinstance(held, (tuple, list)) and held else held
    sizes = getattr(held, "shape", None)
    if sizes is None or not all(isinstance(size, int) for size in sizes):
        raise ValueError(f"{node} has no static shape")
    return tuple(sizes)


def dtype(node: fx.Node) -> torch.dtype | None:
    """Dtype of the node's (first) tensor output, None for anything else."""
    held = value(node)
    held = held[0] if isinstance(held, (tuple, list)) and held else held
    found = getattr(held, "dtype", None)
    return found if isinstance(found, torch.dtype) else None


def arguments(node: fx.Node) -> dict[str, Any]:
    """The call's explicit arguments by the names of the op's schema; empty for what has no schema."""
    if not isinstance(overload_of(node.target), torch._ops.OpOverload):
        return {}
    names = [argument.name for argument in overload_of(node.target)._schema.arguments]
    return dict(zip(names, node.args, strict=False)) | dict(node.kwargs)


def arguments_with_defaults(node: fx.Node) -> dict[str, Any]:
    """As `arguments`, with the schema's defaults for what the call left out."""
    if not isinstance(overload_of(node.target), torch._ops.OpOverload):
        return {}
    defaults = {a.name: a.default_value for a in overload_of(node.target)._schema.arguments if a.has_default_value()}
    return defaults | arguments(node)
