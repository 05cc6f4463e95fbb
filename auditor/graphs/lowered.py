"""The graph of a choice: explicit casts where operations differ, each value cast once, weights stored low where all read them so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn

from ..numerics.formats import dtype_of
from .exported import Exported
from .operations import Table, low_arguments

_aten = torch.ops.aten

COPIED = "copied"
"""Where a node's `meta` has the name of the one that it stands for; casts stand for none."""


def lowered(exported: Exported, table: Table, low: frozenset[str], low_ends: bool = False) -> fx.GraphModule:
    """The exported model with these operations low; it shares with it the weights that stay FP32.

    low_ends: inputs are taken, and outputs returned, in the format; else the casts are in the graph.
    """
    writing = _Writing(exported.graph_module, table, low, low_ends)
    graph = fx.Graph()
    for node in exported.graph_module.graph.nodes:
        writing.copy(node, graph)
    graph._codegen = exported.graph_module.graph._codegen
    graph.lint()
    module = fx.GraphModule(exported.graph_module, graph)
    _store(module, table, dtype_of(table.format))
    return module


class _Writing:
    """Copies a graph node by node. copies: what stands for each; made: casts that there are, by value and dtype."""

    def __init__(self, module: fx.GraphModule, table: Table, low: frozenset[str], low_ends: bool) -> None:
        self.table, self.low, self.low_ends = table, low, low_ends
        self.dtype = dtype_of(table.format)
        self.copies: dict[fx.Node, fx.Node] = {}
        self.made: dict[tuple[fx.Node, torch.dtype], fx.Node] = {}

    def copy(self, node: fx.Node, graph: fx.Graph) -> None:
        """One node, in the precision that it has."""
        wanted = self._wanted(node)
        if node.name in self.low:
            operation = self.table.operations[node.name]
            args, kwargs = low_arguments(node, self.dtype, operation.literals)
        else:
            args, kwargs = node.args, node.kwargs
        reading = self._reading(graph, wanted)
        args, kwargs = fx.node.map_arg(args, reading), fx.node.map_arg(kwargs, reading)
        copy = graph.create_node(node.op, node.target, args, kwargs, node.name)
        copy.meta = {key: value for key, value in node.meta.items() if key in ("nn_module_stack", "stack_trace")}
        copy.meta[COPIED] = node.name
        self.copies[node] = copy

    def _wanted(self, node: fx.Node) -> torch.dtype | None:
        """What a node has its FP32 values in; None takes them as they are, as picking one of several does."""
        if node.op == "output":
            return self.dtype if self.low_ends else torch.float32
        if node.name not in self.table.operations:
            return None
        return self.dtype if node.name in self.low else torch.float32

    def _reading(self, graph: fx.Graph, wanted: torch.dtype | None) -> Callable[[fx.Node], fx.Node]:
        def reading(source: fx.Node) -> fx.Node:
            value = self.table.values.get(source.name)
            copy = self.copies[source]
            if value is None or wanted is None or self._dtype(source) is wanted:
                return copy
            if (copy, wanted) not in self.made:
                cast = graph.call_function(_aten.to.dtype, (copy, wanted))
                cast.meta = {key: each for key, each in copy.meta.items() if key == "nn_module_stack"}
                self.made[copy, wanted] = cast
            return self.made[copy, wanted]

        return reading

    def _dtype(self, source: fx.Node) -> torch.dtype:
        made_by = self.table.values[source.name].made_by
        taken = self.low_ends and source.op == "placeholder"
        return self.dtype if made_by in self.low or taken else torch.float32


def _store(module: fx.GraphModule, table: Table, dtype: torch.dtype) -> None:
    """Weights that nothing reads in FP32, converted once and for all."""
    for node in list(module.graph.nodes):
        value = table.values.get(node.meta[COPIED]) if COPIED in node.meta else None
        if node.op != "get_attr" or value is None or not node.users or not all(map(_is_cast, node.users)):
            continue
        path, _, name = str(node.target).rpartition(".")
        holder = module.get_submodule(path)
        tensor = weight_of(module, node)
        assert tensor is not None
        low = tensor.detach().to(dtype)
        setattr(holder, name, nn.Parameter(low, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else low)
        for user in list(node.users):
            user.replace_all_uses_with(node)
            module.graph.erase_node(user)
    module.recompile()


def weight_of(module: fx.GraphModule, node: fx.Node) -> torch.Tensor | None:
    """The tensor that a node fetches from the module; None where it fetches something else."""
    path, _, name = str(node.target).rpartition(".")
    found = getattr(module.get_submodule(path), name)
    return found if isinstance(found, torch.Tensor) else None


def _is_cast(node: fx.Node) -> Any:
    return node.target is _aten.to.dtype and len(node.args) == 2 and node.args[1] is not torch.float32
