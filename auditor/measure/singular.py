"""Which values an operation divides by, or takes a logarithm or an inverse root of, so that a zero changes everything."""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx

from ..numerics.nodes import row_of
from ..records import Capture

_STEPS = 3


def guarding(capture: Capture) -> set[str]:
    """Names of values at most three operations before an operation that is singular at zero."""
    values = {value for node in capture.graph_module.graph.nodes for value in divisors(node)}
    return {node.name for node in upstream(values)}


def upstream(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """These nodes and those at most two operations before them."""
    frontier, found = set(nodes), set[fx.Node]()
    for _ in range(_STEPS):
        found |= frontier
        frontier = {source for node in frontier if node.op == "call_function" for source in node.all_input_nodes}
    return found


def divisors(node: fx.Node) -> list[fx.Node]:
    """What the node divides by, or takes a logarithm or an inverse root of; nothing for others."""
    if node.op != "call_function":
        return []
    row = row_of(node)
    if row.packet == "pow" and len(node.args) > 1 and isinstance(node.args[1], (int, float)) and node.args[1] < 0:
        position: int | None = 0
    else:
        position = row.singular
    value = node.args[position] if position is not None and len(node.args) > position else None
    return [value] if isinstance(value, fx.Node) else []
