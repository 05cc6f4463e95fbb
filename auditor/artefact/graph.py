"""graph: every operation of the exported graph has a precision of its own, and casts are operations of it."""

from __future__ import annotations

from typing import Any

from torch import nn

from .base import Strategy
from .runtime import Runtime


class GraphRuntime(Runtime):
    """Does nothing to a live module: its plans are programs."""

    @staticmethod
    def stored(model: nn.Module, scopes: dict[str, Any]) -> dict[int, str]:
        """Raises: ValueError."""
        raise ValueError(
            "a plan of strategy graph is no change to a module but a program of its own: "
            "load its file with torch.export.load(FILE).module()"
        )


class Graph(Strategy):
    """For deployment: what runs is the graph, whatever the Python was."""

    name = "graph"
    title = "as a graph"
    purpose = "a program of its own, every operation with its precision; for deployment"
    runtime = GraphRuntime
    rank = 3
    per_operation = True


STRATEGY = Graph()
