"""Matches rules with nodes: by operation, or by a chain of operations in the graph."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import pairwise, product

import networkx as nx

from ..numerics.operations import operation
from ..records import Capture
from .conditions import evaluate
from .facts import NodeFacts
from .rule import Chain, ChainNode, Match

Edges = Sequence[tuple[str, str]]
"""An edge of a chain: (a node, the node that reads its value)."""


class Matcher:
    """Finds the nodes of one capture that rules match; created once per capture."""

    def __init__(self, capture: Capture, facts: Mapping[str, NodeFacts]) -> None:
        self._facts = facts
        self._graph = _values_graph(capture)
        self._by_op: dict[str, list[str]] = {}
        for name, node in capture.nodes.items():
            self._by_op.setdefault(node.op, []).append(name)

    def find(self, match: Match) -> set[str]:
        """Names of the nodes that a match reports, before the rule's `when` is evaluated."""
        result = self._with_ops(match.ops)
        if not match.chains:
            return result
        roles = {name.rstrip("?") for chain in match.chains for path in chain.steps for name in path}
        players = {role: self._players(match.nodes[role]) for role in roles}
        drawn = [(edges, chain.report) for chain in match.chains for edges in _drawings(chain)]
        return {
            name
            for edges, report in drawn
            for name in players[report] & result
            if self._can_complete(edges, players, {report: name})
        }

    def _with_ops(self, patterns: tuple[str, ...]) -> set[str]:
        """Nodes whose operation matches a full name, a packet (`aten.softmax`), or a glob (`aten.linalg_*`)."""
        named = [op for op in self._by_op if any(op.rpartition(".")[0] == p or fnmatchcase(op, p) for p in patterns)]
        return {name for op in named for name in self._by_op[op]}

    def _players(self, node: ChainNode) -> set[str]:
        """Nodes that match one position of a chain; placeholders too, if the position matches any operation (`*`)."""
        named = set(self._graph) if node.ops == ("*",) else self._with_ops(node.ops) & set(self._graph)
        return {n for n in named if n not in self._facts or evaluate(node.when, self._facts[n]) is True}

    def _can_complete(self, edges: Edges, players: Mapping[str, set[str]], cast: dict[str, str]) -> bool:
        """Whether a partially assigned chain can be completed, with a different node at each position."""
        known = [(above, below) for above, below in edges if above in cast and below in cast]
        if not all(self._graph.has_edge(cast[above], cast[below]) for above, below in known):
            return False
        for above, below in edges:
            if (above in cast) != (below in cast):
                role = below if above in cast else above
                near = self._graph.succ[cast[above]] if above in cast else self._graph.pred[cast[below]]
                free = (name for name in near if name in players[role] and name not in cast.values())
                return any(self._can_complete(edges, players, {**cast, role: name}) for name in free)
        return True


def _drawings(chain: Chain) -> Iterator[Edges]:
    """Yield the edges of a chain for each combination of optional nodes."""
    optional = sorted({name for path in chain.steps for name in path if name.endswith("?")})
    for there in product((True, False), repeat=len(optional)):
        kept = dict(zip(optional, there, strict=True))
        paths = [[name.rstrip("?") for name in path if kept.get(name, True)] for path in chain.steps]
        yield list(dict.fromkeys(edge for path in paths for edge in pairwise(path)))


def _values_graph(capture: Capture) -> nx.DiGraph:
    """Graph of operations that read each other's values, without reshapes, selections and casts; with placeholders."""
    origin = {item.name: item.name for item in capture.placeholders}
    graph = nx.DiGraph()
    graph.add_nodes_from(origin)
    for name, node in capture.nodes.items():
        row = operation(node.op)
        if row.assertion:
            continue
        sources = [origin[source] for source in node.inputs if source in origin]
        origin[name] = sources[0] if row.transparent and sources else name
        if origin[name] == name:
            graph.add_edges_from((source, name) for source in sources)
    return graph
