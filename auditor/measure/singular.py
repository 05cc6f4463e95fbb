"""Which values an operation divides by, or takes a logarithm or an inverse root of, so that a zero changes everything."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import fx

from ..ops.nodes import row_of, settled, target_of, tensors_of
from ..raised import let_through
from ..records import Capture

_STEPS = 3

_LITTLE = 0.1
"""Share by which what is divided by may change for an error to move the quotient in proportion."""


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


def divides_alike(start: fx.Node, low: Any, values: Mapping[str, Any]) -> bool:
    """Whether every entry that is divided by soon after a node stays what it is, but for a little, when that gives `low`.

    values: results in FP32, by name. Entries of which many are added up may vanish and their sum be as it was.
    """
    try:
        with torch.no_grad():
            return all(_alike(_given(end, start, low, values), values[end.name]) for end in _guarded(start))
    except Exception as error:
        let_through(error)
        return False


def _guarded(start: fx.Node) -> list[fx.Node]:
    """What is divided by at most two operations after a node, itself included."""
    frontier, found = [start], dict[fx.Node, None]()
    for _ in range(_STEPS):
        found |= {node: None for node in frontier if any(node in divisors(user) for user in node.users)}
        frontier = [user for node in frontier for user in node.users if user.op == "call_function"]
    return list(found)


def _given(node: fx.Node, start: fx.Node, low: Any, values: Mapping[str, Any]) -> Any:
    if node is start:
        return low
    if node.op != "call_function" or start not in upstream([node]):
        return values[node.name]
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda source: _given(source, start, low, values))
    return settled(node.target, target_of(node)(*args, **kwargs))


def _alike(now: Any, before: Any) -> bool:
    pairs = zip(tensors_of(now), tensors_of(before), strict=True)
    return all(bool(((x - y).abs() <= _LITTLE * y.abs()).all()) for x, y in pairs)


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
