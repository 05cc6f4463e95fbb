"""Precision of every scope as a minimum cut: a term per scope, and terms for pairs whose labels differ."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from functools import cached_property

import networkx as nx

from .mincut import Network

FORBIDDEN = 1e6
"""Squared error charged for running an unsafe node low: more than any budget, yet finite, so that cuts stay exact."""

SWEEP = 32
SPAN = 1e10
_LOW, _HIGH = (True,), (False,)
"""The ends of the network: no names of modules."""


@dataclass
class Energy:
    """time + multiplier * error^2 of a choice of precisions, split so that a cut can minimise it.

    scopes: {owner: (price low, price FP32, squared error low)}, prices in seconds. pairs: {(producer, consumer): (squared
    error, seconds) of the cast between them where their precisions differ}. tree: {owner: the owner above it}; a
    difference between the two costs `island` seconds. tied: owners that must agree. held: (owner, holder) where the
    one reads a tied weight that the other holds as well: a holder in FP32 keeps it there, so the owner is low only if the
    holder is. shielded: owners that the author runs outside autocast; a scope of their own would switch it on again, so
    they are low only with the owner above them. So are functions that the owner above them may keep in FP32.
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
        return self._groups.get(owner, set())

    @cached_property
    def _groups(self) -> dict[str, set[str]]:
        groups = nx.connected_components(nx.Graph(list(self.tied)))
        return {owner: group for group in groups for owner in group}

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
        if multiplier not in self._found:
            self._found[multiplier] = self._cut(multiplier)
        return self._found[multiplier]

    @cached_property
    def _found(self) -> dict[float, set[str]]:
        return {}

    def _cut(self, multiplier: float) -> set[str]:
        unit = sum(low + high for low, high, _ in self.scopes.values()) or 1.0
        capacities = [_whole((time + multiplier * error) / unit) for *_, time, error in self._arcs]
        return {node for node in self._network.sink_side(capacities) if isinstance(node, str)}

    @cached_property
    def _network(self) -> Network[Hashable]:
        return Network([(tail, head) for tail, head, *_ in self._arcs], _LOW, _HIGH)

    @cached_property
    def _arcs(self) -> list[tuple[Hashable, Hashable, float, float]]:
        """(tail, head, seconds, squared error) of every arc of the network whose cut is the choice: what it costs to
        have the tail low and the head FP32."""
        found: list[tuple[Hashable, Hashable, float, float]] = []
        for owner, (low, high, error) in self.scopes.items():
            found += [(owner, _HIGH, low, error), (_LOW, owner, high, 0.0)]
        for (producer, consumer), (error, elapsed) in self.pairs.items():
            found += [(consumer, producer, elapsed, error), (producer, consumer, elapsed, 0.0)]  # FP32 into low: rounds
        for owner, above in self.tree.items():
            found += [(owner, above, self.island, 0.0), (above, owner, self.island, 0.0)]
            if owner in self.shielded:
                found.append((owner, above, math.inf, 0.0))
        for a, b in self.tied:
            found += [(a, b, math.inf, 0.0), (b, a, math.inf, 0.0)]
        return found + [(owner, holder, math.inf, 0.0) for owner, holder in self.held]


def _whole(share: float) -> int:
    """Billionths of a billionth: integers make the cut exact, and unique. Prohibitions are large, not infinite, so that
    a cut always exists."""
    return round(min(share, 1e9) * 1e18)


def _depth(path: str) -> int:
    return path.count(".")
