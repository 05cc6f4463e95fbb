"""The graph of a choice: explicit casts where operations differ, each value cast once, weights stored low where all read them so."""

from __future__ import annotations

from functools import partial
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

    Inputs and outputs are FP32: their casts are in the graph. Weights that nothing reads in FP32 are converted for good.
    """
    source, dtype, graph = exported.graph_module.graph, dtype_of(table.format), fx.Graph()
    kinds = {node: dtype if _is_low(node, table, low) else torch.float32 for node in source.nodes}
    copies: dict[fx.Node, fx.Node] = {}
    casts: dict[tuple[fx.Node, torch.dtype], fx.Node] = {}

    def read(given: fx.Node, wanted: torch.dtype | None) -> fx.Node:
        """The copy of a value, cast to what is wanted where that differs."""
        copy = copies[given]
        if given.name not in table.values or wanted is None or kinds[given] is wanted:
            return copy
        if (given, wanted) not in casts:
            cast = casts[given, wanted] = graph.call_function(torch.ops.aten.to.dtype, (copy, wanted))
            cast.meta = {key: x for key, x in copy.meta.items() if key == "nn_module_stack"}
            cast.meta["val"] = copy.meta["val"].to(wanted)
        return casts[given, wanted]

    for node in source.nodes:
        args, kwargs = node.args, node.kwargs
        wanted: torch.dtype | None = torch.float32
        if node.name in low:
            args, kwargs = low_arguments(node, dtype, table.operations[node.name].literals)
            wanted = dtype
        elif node.op != "output" and node.name not in table.operations:
            wanted = None  # as picking one of several takes them as they are
        args, kwargs = fx.node.map_arg((args, kwargs), partial(read, wanted=wanted))
        copy = copies[node] = graph.create_node(node.op, node.target, args, kwargs, node.name)
        copy.meta = {key: value for key, value in node.meta.items() if key in ("nn_module_stack", "stack_trace")}
        copy.meta |= {COPIED: node.name, "val": outlines(node.meta.get("val"), kinds[node])}
    graph._codegen = source._codegen
    graph.lint()
    module = fx.GraphModule(exported.graph_module, graph)
    for node in source.nodes:
        if node.op == "get_attr" and kinds[node] is dtype:
            path, _, name = str(node.target).rpartition(".")
            tensor = attrgetter(str(node.target))(module)
            small = tensor.detach().to(dtype)
            stored = nn.Parameter(small, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else small
            setattr(module.get_submodule(path), name, stored)
    return module


def _is_low(node: fx.Node, table: Table, low: frozenset[str]) -> bool:
    """Whether a node gives low values instead of FP32, a weight because all that read it do so low."""
    value = table.values.get(node.name)
    if value is not None and value.stored:
        return bool(node.users) and all(user.name in low for user in node.users)
    return node.name in low or (value is not None and value.made_by in low)


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
