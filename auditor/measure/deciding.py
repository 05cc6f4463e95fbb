"""Which values stand shortly before an answer that changes by leaps: a discrete result, or what something divides by."""

from __future__ import annotations

from torch import fx

from ..numerics.nodes import row_of
from ..numerics.operations import operation
from ..records import Capture, Node

_STEPS = 3


def deciding(capture: Capture) -> set[str]:
    """Floating nodes at most three operations before a discrete result; all of them if no output is floating."""
    nodes = capture.nodes
    if not any(name not in nodes or nodes[name].floating for name in capture.outputs):
        return {name for name, node in nodes.items() if node.floating}
    discrete = [node for node in nodes.values() if not node.floating and not _is_indifferent(node)]
    return _upstream(capture, {name for node in discrete for name in node.inputs})


def guarding(capture: Capture) -> set[str]:
    """Floating nodes at most three operations before an operation that is singular at zero."""
    return _upstream(capture, {value.name for n in capture.graph_module.graph.nodes for value in divisors(n)})


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


def _upstream(capture: Capture, names: set[str]) -> set[str]:
    """The floating nodes among these, and those that they are computed from in two operations."""
    nodes, found = capture.nodes, set[str]()
    for _ in range(_STEPS):
        names = {name for name in names if name in nodes and nodes[name].floating}
        found |= names
        names = {source for name in names for source in nodes[name].inputs}
    return found


def _is_indifferent(node: Node) -> bool:
    """Whether rounding changes next to nothing of what the node answers."""
    row = operation(node.op)
    return row.asks_shape or row.asks_finite
