"""Where a rule's match applies: by op, position, owner, or a chain of ops found by subgraph isomorphism."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from itertools import product

import networkx as nx
from networkx.algorithms.isomorphism import DiGraphMatcher

from ..numerics.operations import operation
from ..records import Capture
from .conditions import evaluate
from .facts import NodeFacts
from .rule import Chain, ChainNode, Match

Roles = dict[str, set[str]]


def op_matches(op: str, pattern: str) -> bool:
    """Whether `pattern` names `op`: in full, as a packet (`aten.softmax`), or by a glob (`aten.linalg_*`)."""
    return pattern == op.rpartition(".")[0] or fnmatchcase(op, pattern)


class Matcher:
    """Finds matches in one capture; built once, asked for every rule."""

    def __init__(self, capture: Capture, facts: Mapping[str, NodeFacts]) -> None:
        self._facts = facts
        self._graph = _values_graph(capture)
        self._by_op: dict[str, list[str]] = {}
        for name, node in capture.nodes.items():
            self._by_op.setdefault(node.op, []).append(name)

    def find(self, match: Match) -> set[str]:
        """Names of the nodes a match points at; its rule's `when` is not looked at here."""
        found = self._with_ops(match.ops) if match.ops else set(self._facts)
        if match.position is not None:
            found = {name for name in found if getattr(self._facts[name], f"is_{match.position}_layer")}
        if match.owner_type is not None:
            found = {name for name in found if fnmatchcase(self._facts[name].owner_type, match.owner_type)}
        if match.chains:
            graphs = ((graph, chain.report) for chain in match.chains for graph in _alternatives(chain))
            found &= {name for graph, report in graphs for name in self._find_chain(graph, match, report)}
        return found

    def _find_chain(self, chain: nx.DiGraph, match: Match, report: str) -> set[str]:
        """Names of the nodes that play the reported role in an occurrence of the chain."""
        pattern = nx.DiGraph(chain.edges)
        pattern.add_nodes_from((name, {"role": name}) for name in chain)
        roles = self._roles(chain, match)
        if not all(roles.values()):
            return set()
        played: dict[str, set[str]] = {}
        for role, names in roles.items():
            for name in names:
                played.setdefault(name, set()).add(role)
        candidates = self._graph.subgraph(played)
        found: set[str] = set()
        for part in nx.weakly_connected_components(candidates):
            graph = nx.DiGraph(candidates.subgraph(part).edges)
            graph.add_nodes_from((name, {"roles": played[name]}) for name in part)
            found |= _reported(graph, pattern, report, roles[report] & part)
        return found

    def _with_ops(self, patterns: tuple[str, ...]) -> set[str]:
        ops = [op for op in self._by_op if any(op_matches(op, pattern) for pattern in patterns)]
        return {name for op in ops for name in self._by_op[op]}

    def _roles(self, chain: nx.DiGraph, match: Match) -> Roles:
        """Candidates of every role, thinned until each has a candidate neighbour along each of the chain's edges."""
        roles = {name: self._candidates(match.nodes[name]) for name in chain}
        thinning = True
        while thinning and all(roles.values()):
            thinning = False
            for above, below in chain.edges:
                uppers = {name for name in roles[above] if not roles[below].isdisjoint(self._graph.successors(name))}
                lowers = {name for name in roles[below] if not uppers.isdisjoint(self._graph.predecessors(name))}
                thinning |= len(uppers) < len(roles[above]) or len(lowers) < len(roles[below])
                roles[above], roles[below] = uppers, lowers
        return roles

    def _candidates(self, node: ChainNode) -> set[str]:
        if node.ops == ("*",):
            return {name for name in self._graph if name not in self._facts or self._holds(node, name)}
        return {name for name in self._with_ops(node.ops) if name in self._graph and self._holds(node, name)}

    def _holds(self, node: ChainNode, name: str) -> bool:
        return evaluate(node.when, self._facts[name]) is True


def _alternatives(chain: Chain) -> Iterator[nx.DiGraph]:
    """The graphs that a chain stands for: with and without each node that may be missing."""
    optional = sorted({name for path in chain.drawn for name in path if name.endswith("?")})
    for there in product((True, False), repeat=len(optional)):
        left_out = {name for name, kept in zip(optional, there, strict=True) if not kept}
        graph = nx.DiGraph()
        for path in chain.drawn:
            nx.add_path(graph, [name.rstrip("?") for name in path if name not in left_out])
        yield graph


def _reported(graph: nx.DiGraph, pattern: nx.DiGraph, report: str, wanted: set[str]) -> set[str]:
    found: set[str] = set()
    for name in wanted:
        # Everything of one occurrence lies within the pattern's own diameter of the reported node.
        near = graph.subgraph(_around(graph, name, len(pattern) - 1)).copy()
        near.nodes[name]["roles"] = {report}
        matcher = DiGraphMatcher(near, pattern, node_match=lambda held, asked: asked["role"] in held["roles"])
        if any(name in mapping for mapping in matcher.subgraph_monomorphisms_iter()):
            found.add(name)
    return found


def _around(graph: nx.DiGraph, name: str, radius: int) -> set[str]:
    """The nodes at most so many edges away, whichever way those lead."""
    found = frontier = {name}
    for _ in range(radius):
        frontier = {other for near in frontier for other in (*graph.pred[near], *graph.succ[near])} - found
        found = found | frontier
    return found


def _values_graph(capture: Capture) -> nx.DiGraph:
    """Who computes on whose values: reshapes, selections and casts are contracted, placeholders stay."""
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
