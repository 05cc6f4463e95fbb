"""Which operation of one recorded run is which of another: by module, name, line and turn."""

from __future__ import annotations

from ..numerics.nodes import row_of
from ..records import Capture

Place = tuple[str, str, str | None, int]
"""Module, operation, line, and how many of these came before."""


def places_of(captured: Capture) -> dict[Place, str]:
    """{place: node}: what the graphs of two runs of one model share."""
    seen: dict[tuple[str, str, str | None], int] = {}
    found = {}
    for node in captured.graph_module.graph.nodes:
        if node.op != "call_function":
            continue
        described = captured.nodes[node.name]
        row = row_of(node)
        key = (described.owner, "batch_norm" if row.batch_norm else row.name, described.source)
        found[(*key, seen.setdefault(key, 0))] = node.name
        seen[key] += 1
    return found
