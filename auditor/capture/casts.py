"""Explicit casts, kept through functionalisation: a cast to float32 is a no-op in an FP32 trace, yet it is the author's word."""

from __future__ import annotations

import torch
from torch import fx

_FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


@torch.library.custom_op("auditor::cast", mutates_args=())
def _cast(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return x.to(dtype, copy=True)


@_cast.register_fake
def _(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_like(x, dtype=dtype)


def protect_casts(graph_module: fx.GraphModule) -> None:
    """Turn every cast to a floating dtype into an opaque operation, so that no tracer removes it."""
    for node in graph_module.graph.nodes:
        dtype = _target_dtype(node)
        if dtype in _FLOATS:
            node.target, node.args, node.kwargs = torch.ops.auditor.cast.default, (node.args[0], dtype), {}
    graph_module.recompile()


def restore_casts(graph_module: fx.GraphModule) -> None:
    """The inverse: opaque casts become `aten.to.dtype` again."""
    for node in graph_module.graph.nodes:
        if node.target is torch.ops.auditor.cast.default:
            node.target = torch.ops.aten.to.dtype
    graph_module.recompile()


def _target_dtype(node: fx.Node) -> torch.dtype | None:
    aten = torch.ops.aten
    if node.target is aten.to.dtype:
        return node.args[1]
    if node.target is aten.to.device:
        return node.args[2]
    if node.target is aten.to.dtype_layout or node.target is aten._to_copy.default:
        return node.kwargs.get("dtype")
    if node.target is aten.to.other or node.target is aten.type_as.default:
        return node.args[1].meta["val"].dtype
    return None
