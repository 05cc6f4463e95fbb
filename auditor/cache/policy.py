"""A policy as a digest: everything that a run of a graph under it asks of it."""

from __future__ import annotations

from contextlib import suppress

from ..records import Capture
from ..replay.running import AS_WRITTEN, Running
from .content import Contents, Uncomparable


def told(capture: Capture, how: Running) -> str | None:
    """What tells a run of the graph from others on the same inputs; None where nobody can."""
    stored = sorted(how.placeholder_precision.items())
    asked: list[object] = []
    for node in capture.graph_module.graph.nodes:
        crossed = [how.crossing(source.name, node.name) for source in node.all_input_nodes]
        asked.append(crossed if any(crossed) else 0)
        if node.op == "call_function":
            casts = how.casts(capture.nodes[node.name])
            literals = 0 if casts.literals is AS_WRITTEN else casts.literals
            asked.append((casts.autocast, casts.precision, literals))
    with suppress(Uncomparable):
        return Contents().digest(stored, asked)
    return None
