"""The graph of a choice: explicit casts where operations differ, each value cast once, weights stored low where all read them so."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter

import torch
from torch import fx, nn

from ..numerics.formats import dtype_of
from ..numerics.nodes import tensors_of
from ..plan.costs import costs_in, most_alive
from ..records import Memory
from .exported import Exported, outlines
from .operations import Table, is_pick, low_arguments

COPIED = "copied"
"""Where a node's `meta` has the name of the one that it stands for; casts stand for none."""


def lowered(exported: Exported, table: Table, low: frozenset[str]) -> fx.GraphModule:
    """The exported model with these operations low; it shares with it the weights that stay FP32.

    Inputs and outputs are FP32: their casts are in the graph.
    """
    writing = _Writing(table, low)
    for node in exported.graph_module.graph.nodes:
        writing.copy(node)
    writing.graph._codegen = exported.graph_module.graph._codegen
    writing.graph.lint()
    module = fx.GraphModule(exported.graph_module, writing.graph)
    for node in writing.stored:
        path, _, name = str(node.target).rpartition(".")
        holder, tensor = module.get_submodule(path), attrgetter(str(node.target))(module)
        small = tensor.detach().to(writing.dtype)
        setattr(holder, name, nn.Parameter(small, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else small)
    return module


class _Writing:
    """Copies a graph node by node. stored: weights that nothing reads in FP32, which are converted once and for all."""

    def __init__(self, table: Table, low: frozenset[str]) -> None:
        self.table, self.low, self.dtype = table, low, dtype_of(table.format)
        self.graph = fx.Graph()
        self.stored: list[fx.Node] = []
        self._copies: dict[fx.Node, fx.Node] = {}
        self._casts: dict[tuple[fx.Node, torch.dtype], fx.Node] = {}

    def copy(self, node: fx.Node) -> None:
        """One node, in the precision that it has."""
        args, kwargs = node.args, node.kwargs
        if node.name in self.low:
            args, kwargs = low_arguments(node, self.dtype, self.table.operations[node.name].literals)
        reading = self._reading(self._wanted(node))
        args, kwargs = fx.node.map_arg(args, reading), fx.node.map_arg(kwargs, reading)
        copy = self.graph.create_node(node.op, node.target, args, kwargs, node.name)
        copy.meta = {key: value for key, value in node.meta.items() if key in ("nn_module_stack", "stack_trace")}
        copy.meta |= {COPIED: node.name, "val": outlines(node.meta.get("val"), self._dtype(node))}
        if node.op == "get_attr" and self._dtype(node) is self.dtype:
            self.stored.append(copy)
        self._copies[node] = copy

    def _wanted(self, node: fx.Node) -> torch.dtype | None:
        """What a node has its FP32 values in; None takes them as they are, as picking one of several does."""
        if node.op != "output" and node.name not in self.table.operations:
            return None
        return self.dtype if node.name in self.low else torch.float32

    def _reading(self, wanted: torch.dtype | None) -> Callable[[fx.Node], fx.Node]:
        def reading(source: fx.Node) -> fx.Node:
            copy, kind = self._copies[source], self._dtype(source)
            if source.name not in self.table.values or wanted is None or kind is wanted:
                return copy
            if (copy, wanted) not in self._casts:
                cast = self.graph.call_function(torch.ops.aten.to.dtype, (copy, wanted))
                cast.meta = {key: x for key, x in copy.meta.items() if key == "nn_module_stack"}
                cast.meta["val"] = copy.meta["val"].to(wanted)
                self._casts[copy, wanted] = cast
            return self._casts[copy, wanted]

        return reading

    def _dtype(self, node: fx.Node) -> torch.dtype:
        """What a node gives instead of FP32."""
        value = self.table.values.get(node.name)
        stored = (
            value is not None
            and value.stored
            and bool(node.users)
            and all(user.name in self.low for user in node.users)
        )
        low = stored or node.name in self.low or (value is not None and value.made_by in self.low)
        return self.dtype if low else torch.float32


def memory_needed(module: fx.GraphModule) -> Memory:
    """Bytes of a forward of a lowered graph: its weights as they are stored, and the values alive at once.

    Freed, and views, as for every other plan.
    """
    nodes = list(module.graph.nodes)
    size = {node.name: sum(x.nbytes for x in tensors_of(node.meta.get("val"))) for node in nodes}
    free = {name for name, cost in costs_in(module.graph).items() if cost.free}
    free |= {node.name for node in nodes if node.op == "call_function" and is_pick(node)}
    inputs = {node.name for node in nodes if node.op == "placeholder"}
    held = [attrgetter(str(node.target))(module) for node in nodes if node.op == "get_attr"]
    weights = {id(x): x.nbytes for x in held if isinstance(x, torch.Tensor)}
    return Memory(sum(weights.values()), most_alive(nodes, size, free, inputs))
