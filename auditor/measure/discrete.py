"""Which floating values decide a discrete result: an index, a mask, a route."""

from __future__ import annotations

from collections.abc import Mapping

from ..numerics.operations import operation
from ..records import Capture, Node

_STEPS = 3


def deciding(capture: Capture) -> set[str]:
    """Floating nodes at most three operations before a discrete result; all of them if no output is floating."""
    nodes = capture.nodes
    if not any(name not in nodes or nodes[name].floating for name in capture.outputs):
        return {name for name, node in nodes.items() if node.floating}
    frontier = {
        name for name, node in nodes.items() if not node.floating and any(_is_float(nodes, i) for i in node.inputs)
    }
    frontier = {name for name in frontier if not _is_indifferent(nodes[name])}
    found: set[str] = set()
    for _ in range(_STEPS):
        frontier = {i for name in frontier for i in nodes[name].inputs if _is_float(nodes, i)}
        found |= frontier
    return found


def _is_float(nodes: Mapping[str, Node], name: str) -> bool:
    return name in nodes and nodes[name].floating


def _is_indifferent(node: Node) -> bool:
    """Whether rounding changes next to nothing of what the node answers."""
    row = operation(node.op)
    return row.asks_shape or row.asks_finite
