"""Explicit casts, kept through functionalisation: a cast to float32 is a no-op in an FP32 trace, yet it is the author's word."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from ..numerics.formats import LOW_DTYPES
from ..numerics.kernels import raised

_FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


@torch.library.custom_op("auditor::cast", mutates_args=())
def _cast(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return x.to(dtype, copy=True)


@_cast.register_fake
def _(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_like(x, dtype=dtype)


class DistinctCasts(TorchFunctionMode):
    """While tracing: a cast that changes nothing returns its own input, and the tracer would then take every later
    reader of that input for a reader of the cast. Here such a cast works on an alias, so the input keeps its name."""

    _casts = frozenset(
        {torch.Tensor.to, torch.Tensor.float, torch.Tensor.type_as, torch.Tensor.half, torch.Tensor.bfloat16}
    )

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in self._casts and args and isinstance(args[0], torch.Tensor) and args[0].is_floating_point():
            args = (torch.ops.aten.alias.default(args[0]), *args[1:])
        return func(*args, **(kwargs or {}))


class CudaPromotions(TorchFunctionMode):
    """While tracing inside an autocast region without CUDA: operations that autocast on CUDA, and only there, hands
    tensors of one dtype are handed them here too, by casts that the graph then shows."""

    _promoted = frozenset(
        getattr(holder, name)
        for name in ("scatter_add", "index_put", "dot", "vdot")
        for holder in (torch, torch.Tensor)
    )

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in self._promoted and (torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")):
            tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
            if {torch.float32} < {x.dtype for x in tensors if x.dtype in (torch.float32, *LOW_DTYPES)}:
                args, kwargs = raised(args), raised(kwargs)
        return func(*args, **kwargs)


def drop_aliases(graph_module: fx.GraphModule) -> dict[str, str]:
    """Take the aliases out again: readers of an alias read what it names. Returns {alias: what it named}."""
    renamed = {}
    for node in list(graph_module.graph.nodes):
        if node.target is torch.ops.aten.alias.default:
            node.replace_all_uses_with(node.args[0])
            renamed[node.name] = node.args[0].name
            graph_module.graph.erase_node(node)
    graph_module.recompile()
    return renamed


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


def _target_dtype(node: fx.Node) -> Any:
    aten = torch.ops.aten
    if node.target is aten.to.dtype:
        return node.args[1]
    if node.target is aten.to.device:
        return node.args[2]
    if node.target is aten.to.dtype_layout or node.target is aten._to_copy.default:
        return node.kwargs.get("dtype")
    if node.target is aten.to.other or node.target is aten.type_as.default:
        return node.all_input_nodes[-1].meta["val"].dtype
    return None
