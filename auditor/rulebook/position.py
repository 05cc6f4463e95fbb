"""Where a node stands in the model: first or last layer with weights, or weights-only arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import networkx as nx

from ..numerics.operations import operation
from ..records import Capture


@dataclass(frozen=True)
class Positions:
    """Names of the nodes at each position."""

    first: frozenset[str]
    last: frozenset[str]
    from_weights: frozenset[str]


def positions(capture: Capture) -> Positions:
    """First layers: no other layer upstream. Last layers: none between them and an output they reach.

    A layer is an operation that makes one, of which some, but not all, inputs come from parameters alone (through any arithmetic: a
    weight norm's product counts); norms and scales are none. A model with several branches has several firsts and lasts.
    """
    graph = nx.DiGraph((source, node.name) for node in capture.nodes.values() for source in node.inputs)
    graph.add_nodes_from(capture.nodes)
    weights = _from_weights(capture)
    layers = _layers(capture, weights)
    alive = layers & _reachable(graph.reverse(copy=False), capture.outputs)
    below = _reachable(graph, _neighbours(graph.successors, layers))
    above = _reachable(graph.reverse(copy=False), _neighbours(graph.predecessors, alive))
    return Positions(
        first=frozenset(alive - below),
        last=frozenset(alive - above),
        from_weights=frozenset(weights),
    )


def _layers(capture: Capture, weights: set[str]) -> set[str]:
    parameters = _parameter_derived(capture)
    return {
        name
        for name, node in capture.nodes.items()
        if operation(node.op).makes_layer
        and any(source in parameters for source in node.inputs)
        and (not all(source in weights for source in node.inputs) or operation(node.op).embedding)
    }


def _parameter_derived(capture: Capture) -> set[str]:
    found = {item.name for item in capture.placeholders if item.kind == "parameter"}
    weights = _from_weights(capture) | {item.name for item in capture.placeholders if item.kind != "input"}
    for name, node in capture.nodes.items():
        if name in weights and any(source in found for source in node.inputs):
            found.add(name)
    return found


def _from_weights(capture: Capture) -> set[str]:
    """Operations no input of the model reaches; the placeholders they start from are held beside them."""
    fixed = {item.name for item in capture.placeholders if item.kind != "input"}
    for name, node in capture.nodes.items():
        if all(source in fixed for source in node.inputs):
            fixed.add(name)
    return fixed


def _reachable(graph: nx.DiGraph, starts: Iterable[str]) -> set[str]:
    return {name for layer in nx.bfs_layers(graph, [s for s in starts if s in graph]) for name in layer}


def _neighbours(step: Callable[[str], Iterable[str]], names: Iterable[str]) -> set[str]:
    return {neighbour for name in names for neighbour in step(name)}
