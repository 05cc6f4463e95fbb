"""Precision of every scope as a minimum cut: a term per scope, and terms for pairs whose labels differ."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import networkx as nx

from ..execution.policy import plain, readers_of
from ..execution.resolve import Resolution
from ..numerics.operations import operation
from ..paths import enclosing, function_in, nearest_above
from ..records import Capture
from .mincut import Network

if TYPE_CHECKING:
    from .problem import Problem


FORBIDDEN = 1e6
"""Squared error charged for running an unsafe node low: more than any budget, yet finite, so that cuts stay exact."""

SWEEP = 32
SPAN = 1e10
NEAR = 12
"""How many of those that save next more an error each owner may take the place of."""
_LOW, _HIGH = " low", " FP32"
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

    def together(self, owner: str) -> tuple[str, ...]:
        """An owner and those that must agree with it."""
        return self._tied_groups.get(owner, (owner,))

    @cached_property
    def _tied_groups(self) -> dict[str, tuple[str, ...]]:
        groups = nx.connected_components(nx.Graph(list(self.tied)))
        return {owner: tuple(sorted(group)) for group in groups for owner in group}

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

    def saving(self, owner: str) -> float:
        """Seconds that an owner's own operations take less where they are low."""
        low, high, _ = self.scopes[owner]
        return high - low

    def worth(self, owner: str) -> float:
        """The same a squared error."""
        return self.saving(owner) / max(self.scopes[owner][2], 1e-30)

    @cached_property
    def groups(self) -> list[tuple[str, ...]]:
        """What is lowered or raised together: an owner with those tied to it, or all below a module; those first that save most."""
        groups, below = {self.together(owner) for owner in self.scopes}, dict[str, set[str]]()
        for owner in self.scopes:
            for path in enclosing(owner):
                below.setdefault(path, set()).update(self.together(owner))
        groups |= {tuple(sorted(inside)) for inside in below.values()}
        return sorted(groups, key=lambda group: (-sum(map(self.saving, group)), group))

    @cached_property
    def neighbours(self) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
        """Owners, with those tied to them, that may change together: they exchange values, one lies above the other, or they
        save about as much an error, so that one may take the place of the other."""
        ordered = sorted(set(map(self.together, self.scopes)), key=lambda each: (max(map(self.worth, each)), each))
        found = [(self.together(one), self.together(other)) for one, other in (*self.pairs, *self.tree.items())]
        found += [(one, other) for i, one in enumerate(ordered) for other in ordered[i + 1 : i + 1 + NEAR]]
        return [pair for pair in dict.fromkeys(found) if pair[0] != pair[1]]

    def multipliers(self) -> list[float]:
        """Geometric steps around the ratio of all time to all error that is at stake."""
        saved = sum(abs(high - low) for low, high, _ in self.scopes.values())
        harm = sum(error for *_, error in self.scopes.values() if error < FORBIDDEN / 2)
        middle = saved / harm if harm > 0 and saved > 0 else 1.0
        return [middle * SPAN ** (step / (SWEEP - 1) - 0.5) for step in range(SWEEP)]

    def cut(self, multiplier: float) -> set[str]:
        """Scopes that are FP32 at the minimum; of equal minima, the one with the fewest."""
        unit = sum(low + high for low, high, _ in self.scopes.values()) or 1.0
        capacities = [_whole((arc.cost + arc.island + multiplier * arc.square) / unit) for arc in self._arcs]
        return self._network.sink_side(capacities) - {_HIGH}

    def changed(self, precision: Mapping[str, str], change: Mapping[str, str]) -> tuple[dict[str, str], Value]:
        """All that changes with a choice of precisions, what must go along included, and what that is worth: told from the
        edges of what changes alone."""
        settled = self.settled({**precision, **change}) if self.held or self.shielded else change
        change = {owner: label for owner, label in settled.items() if label != precision[owner]}

        def was_low(end: str) -> bool:
            return end == _LOW or precision.get(end, "fp32") != "fp32"

        def is_low(end: str) -> bool:
            return change[end] != "fp32" if end in change else was_low(end)

        cost = island = square = 0.0
        for arc in (self._arcs[index] for index in {index for owner in change for index in self._touching[owner]}):
            paid = (is_low(arc.tail) and not is_low(arc.head)) - (was_low(arc.tail) and not was_low(arc.head))
            if paid:
                cost, island, square = cost + paid * arc.cost, island + paid * arc.island, square + paid * arc.square
        return change, Value(cost, island, square)

    @cached_property
    def _touching(self) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for index, arc in enumerate(self._arcs):
            for end in (arc.tail, arc.head):
                found.setdefault(end, []).append(index)
        return found

    @cached_property
    def _network(self) -> Network[str]:
        return Network([(arc.tail, arc.head) for arc in self._arcs], _LOW, _HIGH)

    @cached_property
    def _arcs(self) -> list[Arc]:
        """The network whose cut is the choice: an arc is paid for where its tail is low and its head FP32."""
        found: list[Arc] = []
        for owner, (low, high, error) in self.scopes.items():
            found += [Arc(owner, _HIGH, low, 0.0, error), Arc(_LOW, owner, high)]
        for (producer, consumer), (error, elapsed) in self.pairs.items():  # FP32 into low: rounds
            found += [Arc(consumer, producer, elapsed, 0.0, error), Arc(producer, consumer, elapsed)]
        for owner, above in self.tree.items():
            found += [Arc(owner, above, 0.0, self.island), Arc(above, owner, 0.0, self.island)]
        never = [*self.tied, *((b, a) for a, b in self.tied), *self.held]
        never += [(owner, above) for owner, above in self.tree.items() if owner in self.shielded]
        return found + [Arc(owner, other, math.inf) for owner, other in never]


class Value(NamedTuple):
    """Seconds, those that the length of the plan counts for, and squared error."""

    cost: float
    island: float
    square: float

    @property
    def price(self) -> float:
        """What it counts for but for its error."""
        return self.cost + self.island


class Arc(NamedTuple):
    """One arc of the network, and what it costs to have its tail low and its head FP32."""

    tail: str
    head: str
    cost: float
    island: float = 0.0
    square: float = 0.0


def _whole(share: float) -> int:
    """Billionths of a billionth: integers make the cut exact, and unique. Prohibitions are large, not infinite, so that
    a cut always exists."""
    return round(min(share, 1e9) * 1e18)


def _depth(path: str) -> int:
    return path.count(".")


def timed_in(resolution: Resolution, name: str) -> str:
    """Precision a node is timed in; discrete ones move as many bytes either way."""
    return resolution.computed(name) or "fp32"


def energy_of(problem: Problem) -> Energy:
    """The energy of a problem, its terms taken where everything is low that can be, and where everything is FP32."""
    lowest, raised = problem.lowest, problem.resolve(plain("fp32"))
    resolution, held = lowest.resolution, lowest.raised
    nodes, users = problem.capture.nodes, _users(problem.capture)
    functions = [function_in(owner, name) for owner, names in problem.exceptions.items() for name in sorted(names)]
    scopes = dict.fromkeys((*problem.layout.owners, *functions), (0.0, 0.0, 0.0))
    decides = {name: problem.variable(name) for name in nodes}

    def charge(owner: str, low: float, high: float, error: float) -> None:
        a, b, c = scopes[owner]
        scopes[owner] = (a + low, b + high, c + error)

    pairs: dict[tuple[str, str], tuple[float, float]] = {}

    def exchange(producer: str, consumer: str, value: str) -> None:
        error, elapsed = pairs.get((producer, consumer), (0.0, 0.0))
        square = problem.cast_square(resolution, value)
        pairs[producer, consumer] = (error + square, elapsed + problem.cast_price(value))

    stores = problem.how.stores
    entering = {p.name for p in problem.capture.placeholders if p.kind == "input" and p.kind in stores}
    for name, node in nodes.items():
        low, high = (problem.node_price(name, each) for each in (resolution, raised))
        charge(decides[name], low, high, problem.node_square(resolution, name))
        if resolution.low(name) or (node.floating and (node.owner in held or decides[name] in held)):
            for consumer in {decides[user] for user in users.get(name, ())} - {decides[name]}:
                exchange(decides[name], consumer, name)
    for owner in held:
        charge(owner, 0.0, 0.0, FORBIDDEN)
    for name in problem.rounded_values(resolution):
        if name in nodes and (nodes[name].owner in held or decides[name] in held):
            continue  # the pairs have it
        casting = resolution.lowered.get(name) or _past_views(problem.capture, users, name) or users.get(name, [])
        maker = decides.get(name, "")  # the graph's output is in no scope: the one that hands the value on casts it
        readers = {decides.get(user, maker) for user in casting}
        if name in entering:  # the root rounds its inputs; if it does not, the scopes that read them do
            charge("", 0.0, 0.0, problem.cast_square(resolution, name))
            for owner in readers - {""}:
                exchange("", owner, name)
            continue
        for owner in readers:
            charge(owner, 0.0, 0.0, problem.cast_square(resolution, name) / len(readers))
    if problem.byte_price:
        for name, owners in readers_of(problem.capture).items():
            low, high = (problem.stored_price(name, precision) for precision in (problem.format, "fp32"))
            for owner in owners if resolution.low(name) else ():
                charge(owner, low / len(owners), high / len(owners), 0.0)
    tree = {owner: above for owner in scopes if (above := nearest_above(owner, scopes)) is not None}
    return Energy(scopes, pairs, tree, *_tied(problem), problem.island, _shielded(problem) | set(functions))


def _users(capture: Capture) -> dict[str, list[str]]:
    """{value: nodes that read it}."""
    found: dict[str, list[str]] = {}
    for node in capture.nodes.values():
        for source in node.inputs:
            found.setdefault(source, []).append(node.name)
    return found


def _past_views(capture: Capture, users: dict[str, list[str]], name: str) -> list[str]:
    """Nodes that compute with a weight, buffer or input, views of it passed by."""
    waiting, seen = list(users.get(name, ())), dict[str, None]()
    while waiting:
        reader = waiting.pop()
        if reader not in seen:
            seen[reader] = None
            waiting += users.get(reader, ()) if operation(capture.nodes[reader].op).view else ()
    return [reader for reader in seen if not operation(capture.nodes[reader].op).view]


def _shielded(problem: Problem) -> frozenset[str]:
    """Owners all of whose operations lie in regions where the author switches autocast off before calling them."""
    if not problem.how.regional:
        return frozenset()
    nodes = problem.capture.nodes.values()
    free = {n.owner for n in nodes if n.region is None or n.region.enabled or len(n.calls) <= n.region.depth}
    return frozenset({node.owner for node in nodes} - free)


def _tied(problem: Problem) -> tuple[set[tuple[str, str]], set[tuple[str, str]]]:
    """What one precision of each tensor that the strategy stores asks of scopes.

    First those that read one: they share theirs. Then each that reads one with each that merely holds it.
    """
    kinds = problem.how.stores - {"input"}
    readers, tied, held = readers_of(problem.capture), set[tuple[str, str]](), set[tuple[str, str]]()
    for place in problem.capture.placeholders:
        if place.kind in kinds and place.name in readers:
            first, *others = readers[place.name]
            tied |= {(first, other) for other in others}
            held |= {(first, holder) for holder in place.holders if place.tied and holder not in readers[place.name]}
    return tied, held
