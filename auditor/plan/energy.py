"""Precision of every scope as a minimum cut: a term per scope, and terms for pairs whose labels differ."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass

import networkx as nx

FORBIDDEN = 1e6
"""Squared error charged for running an unsafe node low: more than any budget, yet finite, so that cuts stay exact."""

SWEEP = 32
SPAN = 1e10
_LOW, _HIGH = "low", "high"


@dataclass
class Energy:
    """time + multiplier * error^2 of a choice of precisions, split so that a cut can minimise it.

    scopes: {owner: (price low, price FP32, squared error low)}, prices in seconds. pairs: {(producer, consumer): (squared
    error, seconds) of the cast between them where their precisions differ}. tree: {owner: the owner above it}; a
    difference between the two costs `island` seconds. tied: owners that must agree. held: (owner, holder) where the
    one reads a tied weight that the other holds as well: a holder in FP32 keeps it there, so the owner is low only if the
    holder is. shielded: owners that the author runs outside autocast; a scope of their own would switch it on again, so
    they are low only with the owner above them.
    """

    scopes: dict[str, tuple[float, float, float]]
    pairs: dict[tuple[str, str], tuple[float, float]]
    tree: dict[str, str]
    tied: set[tuple[str, str]]
    held: set[tuple[str, str]]
    island: float
    shielded: frozenset[str] = frozenset()

    def tied_to(self, owner: str) -> set[str]:
        """Owners that must agree with this one."""
        graph = nx.Graph(list(self.tied))
        return set(nx.node_connected_component(graph, owner)) if owner in graph else set()

    def settled(self, precision: Mapping[str, str]) -> dict[str, str]:
        """The precisions, with holders low where an owner asks for it and shielded owners in FP32 where the one above is.

        A holder that nothing else is charged to is otherwise as the owner above it.
        """
        found = dict(precision)
        for holder in sorted({holder for _, holder in self.held}, key=_depth):
            low = {found[owner] for owner, other in self.held if other == holder} - {"fp32"}
            if low:
                found[holder] = low.pop()
            elif holder in self.tree and not any(self.scopes[holder]):
                found[holder] = found[self.tree[holder]]
        for owner in sorted(self.shielded & self.tree.keys(), key=_depth):
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
        for owner, holder in self.held:
            graph.add(("scope", owner), ("scope", holder), float("inf"))
        _, (_, high_side) = nx.minimum_cut(graph.graph, _LOW, _HIGH)
        return {node[1] for node in high_side if isinstance(node, tuple)}


def _depth(path: str) -> int:
    return path.count(".")


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
