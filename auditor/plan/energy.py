"""Precision of every scope as a minimum cut: a term per scope, and terms for pairs whose labels differ."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass

import networkx as nx

from ..records import Capture
from ..replay.strategies import plain, readers_of
from .costs import cast_seconds, output_elements, seconds
from .problem import FORBIDDEN, Problem, compute_dtype, nearest_above

ISLAND_SHARE = 0.003
"""Share of the FP32 time that one more scope must be worth: of plans that cost alike, people want the short one."""

SWEEP = 32
SPAN = 1e10
_LOW, _HIGH = "low", "high"


@dataclass
class Energy:
    """time + multiplier * error^2 of a choice of precisions, split so that a cut can minimise it.

    scopes: {owner: (seconds low, seconds FP32, squared error low)}. pairs: {(producer, consumer): (squared error,
    seconds) of the cast between them where their precisions differ}. tree: {owner: the owner above it}; a difference
    between the two costs `island` seconds. tied: owners that must agree. shielded: owners that the author runs outside
    autocast; a scope of their own would switch it on again, so they are low only with the owner above them.
    """

    scopes: dict[str, tuple[float, float, float]]
    pairs: dict[tuple[str, str], tuple[float, float]]
    tree: dict[str, str]
    tied: set[tuple[str, str]]
    island: float
    shielded: frozenset[str] = frozenset()

    def tied_to(self, owner: str) -> set[str]:
        """Owners that must agree with this one."""
        graph = nx.Graph(list(self.tied))
        return set(nx.node_connected_component(graph, owner)) if owner in graph else set()

    def settled(self, precision: Mapping[str, str]) -> dict[str, str]:
        """The precisions, with every shielded owner in FP32 where the one above it is."""
        found = dict(precision)
        for owner in sorted(self.shielded & self.tree.keys(), key=lambda path: path.count(".")):
            if found[self.tree[owner]] == "fp32":
                found[owner] = "fp32"
        return found

    def multipliers(self) -> list[float]:
        """Geometric steps around the ratio of all time to all error that is at stake."""
        saved = sum(abs(high - low) for low, high, _ in self.scopes.values())
        harm = sum(error for *_, error in self.scopes.values() if error < FORBIDDEN / 2)
        middle = saved / harm if harm > 0 and saved > 0 else 1.0
        return [middle * SPAN ** (step / (SWEEP - 1) - 0.5) for step in range(SWEEP)]

    def cut(self, multiplier: float) -> set[str]:
        """Scopes that are FP32 at the minimum; of equal minima, the one with the fewest."""
        total = sum(low + high for low, high, _ in self.scopes.values()) or 1.0
        graph = _Capacities(total)
        for owner, (low, high, error) in self.scopes.items():
            graph.add(("scope", owner), _HIGH, low + multiplier * error)  # paid where the scope is low
            graph.add(_LOW, ("scope", owner), high)
        for (producer, consumer), (error, elapsed) in self.pairs.items():
            graph.add(("scope", consumer), ("scope", producer), elapsed + multiplier * error)  # FP32 into low: rounds
            graph.add(("scope", producer), ("scope", consumer), elapsed)
        for owner, above in self.tree.items():
            graph.add_both(("scope", owner), ("scope", above), self.island)
            if owner in self.shielded:
                graph.add(("scope", owner), ("scope", above), float("inf"))
        for a, b in self.tied:
            graph.add_both(("scope", a), ("scope", b), float("inf"))
        _, (_, high_side) = nx.minimum_cut(graph.graph, _LOW, _HIGH)
        return {node[1] for node in high_side if isinstance(node, tuple)}


class _Capacities:
    """A flow network in whole billionths of a billionth of the total time: integers make the cut exact, and unique.

    Prohibitions are large, not infinite, so that a cut always exists.
    """

    def __init__(self, unit: float) -> None:
        self.unit, self.graph = unit, nx.DiGraph()

    def add(self, source: Hashable, target: Hashable, capacity: float) -> None:
        present = self.graph.get_edge_data(source, target, {"capacity": 0})["capacity"]
        self.graph.add_edge(source, target, capacity=present + round(min(capacity / self.unit, 1e9) * 1e18))

    def add_both(self, a: Hashable, b: Hashable, capacity: float) -> None:
        self.add(a, b, capacity)
        self.add(b, a, capacity)


def energy_of(problem: Problem) -> Energy:
    """The energy of a problem, its terms taken where everything is low."""
    resolution = problem.resolve(plain(problem.format))
    nodes, elements, users = problem.capture.nodes, output_elements(problem.capture), _users(problem.capture)
    scopes = {"": (0.0, 0.0, 0.0)} | {node.owner: (0.0, 0.0, 0.0) for node in nodes.values()}

    def charge(owner: str, low: float, high: float, error: float) -> None:
        a, b, c = scopes[owner]
        scopes[owner] = (a + low, b + high, c + error)

    pairs: dict[tuple[str, str], tuple[float, float]] = {}

    def exchange(producer: str, consumer: str, value: str) -> None:
        error, elapsed = pairs.get((producer, consumer), (0.0, 0.0))
        cast = cast_seconds(elements[value], problem.format, problem.device)
        pairs[producer, consumer] = (error + problem.cast_square(value), elapsed + cast)

    entering = {p.name for p in problem.capture.placeholders if p.kind == "input" and problem.strategy == "cast"}
    for name, node in nodes.items():
        cost = problem.costs[name]
        low = seconds(cost, compute_dtype(resolution, name), problem.device)
        charge(node.owner, low, seconds(cost, "fp32", problem.device), problem.node_square(resolution, name))
        if resolution.low(name):
            for consumer in {nodes[user].owner for user in users.get(name, ())} - {node.owner}:
                exchange(node.owner, consumer, name)
    for name in problem.rounded_values(resolution):
        casting = resolution.lowered.get(name) or users.get(name, [])
        readers = {nodes[user].owner for user in casting}
        if name in entering:  # the root rounds its inputs; if it does not, the scopes that read them do
            charge("", 0.0, 0.0, problem.cast_square(name))
            for owner in readers - {""}:
                exchange("", owner, name)
            continue
        for owner in readers:
            charge(owner, 0.0, 0.0, problem.cast_square(name) / len(readers))
    tree = {owner: above for owner in scopes if (above := nearest_above(owner, scopes)) is not None}
    return Energy(scopes, pairs, tree, _tied(problem), island_seconds(problem), _shielded(problem))


def island_seconds(problem: Problem) -> float:
    """What one more scope in the plan must save."""
    return ISLAND_SHARE * sum(seconds(cost, "fp32", problem.device) for cost in problem.costs.values())


def _users(capture: Capture) -> dict[str, list[str]]:
    """{value: nodes that read it}."""
    found: dict[str, list[str]] = {}
    for node in capture.nodes.values():
        for source in node.inputs:
            found.setdefault(source, []).append(node.name)
    return found


def _shielded(problem: Problem) -> frozenset[str]:
    """Owners all of whose operations lie in regions where the author switches autocast off before calling them."""
    if problem.strategy != "autocast":
        return frozenset()
    nodes = problem.capture.nodes.values()
    free = {n.owner for n in nodes if n.region is None or n.region.enabled or len(n.calls) <= n.region.depth}
    return frozenset({node.owner for node in nodes} - free)


def _tied(problem: Problem) -> set[tuple[str, str]]:
    """Scopes that read one stored tensor: under `cast` it has one precision, so they share theirs."""
    if problem.strategy != "cast":
        return set()
    inputs = {placeholder.name for placeholder in problem.capture.placeholders if placeholder.kind == "input"}
    readers = readers_of(problem.capture)
    groups = [owners for name, owners in readers.items() if len(owners) > 1 and name not in inputs]
    return {(owners[0], other) for owners in groups for other in owners[1:]}
