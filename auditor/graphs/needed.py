"""What a forward of a lowered graph keeps in memory: its weights as they are stored, and the values alive at once."""

from __future__ import annotations

import torch
from torch import fx

from ..artefact.strategies import SHIPPED
from ..numerics.formats import FORMATS
from ..numerics.nodes import tensors_of
from ..plan.costs import memory_of, most_alive
from ..plan.workbench import Workbench
from ..records import Memory
from .lowered import COPIED, weight_of
from .operations import Seen, Table, is_pick


def memory_needed(module: fx.GraphModule, seen: Seen, table: Table, low: frozenset[str]) -> Memory:
    """Of the graph that a choice comes to. low: what is low in it. Freed, and views, as for every other plan."""
    nodes = list(module.graph.nodes)
    views = {node.name for node in seen.graph.nodes if node.op == "call_function" and seen.cost(node).free}
    size, free, inputs = {}, set(), {node.name for node in nodes if node.op == "placeholder"}
    for node in nodes:
        size[node.name] = _bytes(node, seen, table, low)
        if node.op == "call_function" and COPIED in node.meta and (is_pick(node) or node.meta[COPIED] in views):
            free.add(node.name)
    weights = {id(x): x.nbytes for node in nodes if node.op == "get_attr" if (x := weight_of(module, node)) is not None}
    return Memory(sum(weights.values()), most_alive(nodes, size, free, inputs))


def memory_in_fp32(bench: Workbench) -> Memory:
    """Of the model in FP32: what every other plan of the audit is held against too."""
    format = next(iter(bench.contributions))
    nothing_low = bench.problem(SHIPPED[0], format).resolve(lambda owner: "fp32")
    return memory_of(bench.capture, bench.costs, nothing_low, format)


def _bytes(node: fx.Node, seen: Seen, table: Table, low: frozenset[str]) -> int:
    """What a node's result takes; weights are counted apart."""
    if node.op in ("get_attr", "output"):
        return 0
    name = node.meta.get(COPIED)
    if name is None:  # a cast
        source, dtype = node.args[:2]
        assert isinstance(source, fx.Node)
        assert isinstance(dtype, torch.dtype)
        return int(seen.values[source.meta[COPIED]].numel() * dtype.itemsize)
    small = FORMATS[table.format].bytes if name in low else torch.float32.itemsize
    return sum(
        x.numel() * (small if x.dtype is torch.float32 else x.dtype.itemsize) for x in tensors_of(seen.values[name])
    )
