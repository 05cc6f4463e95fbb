"""Operations that the author wrote in place: a functional graph shows others, which autocast treats differently."""

from __future__ import annotations

from torch import fx

from ..fxnodes import mutates, packet_name

_KEY = "auditor_in_place"


def mark_in_place(graph_module: fx.GraphModule) -> None:
    """Remember, beside each operation that writes to its argument, which one it is; before functionalising."""
    for node in graph_module.graph.nodes:
        if node.op == "call_function" and mutates(node.target):
            node.meta["custom"] = {**(node.meta.get("custom") or {}), _KEY: packet_name(node.target)}


def written_in_place(graph_module: fx.GraphModule) -> frozenset[str]:
    """Names of the operations that now stand for one in place, and of those that still are."""
    found = set()
    for node in graph_module.graph.nodes:
        marked = (node.meta.get("custom") or {}).get(_KEY)
        if node.op == "call_function" and marked in (packet_name(node.target), f"{packet_name(node.target)}_"):
            found.add(node.name)
    return frozenset(found)
