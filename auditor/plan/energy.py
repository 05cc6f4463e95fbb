"""Formulates the choice of precisions as a minimum cut. An owner is a module, or a function in a module, with its own
precision."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING

import networkx as nx

from ..capture.paths import reach
from ..execution.policy import plain, readers_of
from ..execution.resolve import Resolution
from ..numerics.operations import operation
from ..paths import function_in, nearest_above
from ..records import Capture
from .costs import TIE, cast_seconds
from .mincut import FORBIDDEN, HIGH, LOW, Arc, Cuts
from .outputs import without_effect

if TYPE_CHECKING:
    from .problem import Problem


@dataclass
class Energy:
    """Price + multiplier * squared error of a choice of precisions, as terms that a minimum cut can minimize.

    scopes: {owner: (price if low, price if FP32, squared error if low)}, prices in seconds. pairs: {(producer,
    consumer): (squared error, seconds) of the cast between them if their precisions differ}. tree: {owner: the owner
    above it}; a different precision costs `island` seconds. tied: pairs of owners that share a stored weight, and so
    must have the same precision. shielded: owners that can be low only if the owner above is low: functions that it may
    keep in FP32, and owners that the model's code runs without autocast, which a separate scope would enable again.
    """

    scopes: dict[str, tuple[float, float, float]]
    pairs: dict[tuple[str, str], tuple[float, float]]
    tree: dict[str, str]
    tied: set[tuple[str, str]]
    island: float
    shielded: frozenset[str] = frozenset()

    def together(self, owner: str) -> tuple[str, ...]:
        """An owner, and all owners that must have the same precision."""
        return self._tied_groups.get(owner, (owner,))

    @cached_property
    def _tied_groups(self) -> dict[str, tuple[str, ...]]:
        groups = nx.connected_components(nx.Graph(list(self.tied)))
        return {owner: tuple(sorted(group)) for group in groups for owner in group}

    def settle(self, high: Collection[str]) -> frozenset[str]:
        """All FP32 owners: those in `high`, and every shielded owner below an FP32 owner; and FP32 outputs."""
        result = set(high)
        for owner in sorted(self.shielded & self.tree.keys(), key=lambda path: path.count(".")):
            if self.tree[owner] in result:
                result.add(owner)
        return frozenset(result - without_effect(result))

    def saving_of(self, owner: str) -> float:
        """Seconds saved if the operations directly in an owner run in low precision."""
        low, high, _ = self.scopes[owner]
        return high - low

    @cached_property
    def groups(self) -> list[frozenset[str]]:
        """Sets to lower together: an owner, or an owner and all below it, plus tied owners. Best saving per error
        first."""

        def worth(group: frozenset[str]) -> float:
            square = sum(self.scopes[owner][2] for owner in group)
            return sum(map(self.saving_of, group)) / square if square else math.inf

        below = nx.DiGraph((above, owner) for owner, above in self.tree.items())
        wholes = ({above, *nx.descendants(below, above)} for above in below)
        several = (*({owner} for owner in self.scopes), *wholes)
        groups = {frozenset(each for owner in group for each in self.together(owner)) for group in several}
        return sorted(groups, key=lambda group: (-worth(group), sorted(group)))

    @cached_property
    def cuts(self) -> Cuts:
        """The network of the cut: an arc's price is paid if its tail is in low precision and its head is FP32."""
        result: list[Arc] = []
        for owner, (low, high, error) in self.scopes.items():
            result += [Arc(owner, HIGH, low, error), Arc(LOW, owner, high)]
        for (producer, consumer), (error, elapsed) in self.pairs.items():  # from FP32 to low: also rounds
            result += [Arc(consumer, producer, elapsed, error), Arc(producer, consumer, elapsed)]
        for owner, above in self.tree.items():
            result += [Arc(owner, above, self.island), Arc(above, owner, self.island)]
        never = [*self.tied, *((b, a) for a, b in self.tied)]
        never += [(owner, above) for owner, above in self.tree.items() if owner in self.shielded]
        result += [Arc(owner, other, math.inf) for owner, other in never]
        return Cuts(result, sum(low + high for low, high, _ in self.scopes.values()))


def timed_in(resolution: Resolution, name: str) -> str:
    """Format for predicting a node's time; FP32 for other dtypes, whose bytes never change."""
    return resolution.nodes[name].factors or resolution.computed_format(name) or "fp32"


def energy_of(problem: Problem) -> Energy:
    """The energy of a problem, from prices and errors of all FP32 and of all low (except where dtypes conflict)."""
    lowest, raised = problem.lowest, problem.resolve(plain("fp32"))
    resolution, held = lowest.resolution, lowest.raised
    nodes, graph = problem.capture.nodes, problem.capture.graph_module.graph
    users = {n.name: [user.name for user in n.users if user.name in nodes] for n in graph.nodes}
    functions = [function_in(owner, name) for owner, names in problem.exceptions.items() for name in sorted(names)]
    scopes = dict.fromkeys((*problem.layout.owners, *functions), (0.0, 0.0, 0.0))
    decides = {name: problem.variable(name) for name in nodes}

    def charge(owner: str, low: float, high: float, error: float) -> None:
        a, b, c = scopes[owner]
        scopes[owner] = (a + low, b + high, c + error)

    pairs, share = dict[tuple[str, str], tuple[float, float]](), 1.0 if problem.objective == "time" else TIE

    def exchange(producer: str, consumer: str, value: str) -> None:
        error, elapsed = pairs.get((producer, consumer), (0.0, 0.0))
        square = problem.cast_square(resolution, value)
        price = share * cast_seconds(problem.elements[value], problem.format, problem.device)
        pairs[producer, consumer] = (error + square, elapsed + price)

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
            continue  # counted in `pairs`
        casting = resolution.lowered.get(name) or _past_views(problem.capture, users, name) or users.get(name, [])
        maker = decides.get(name, "")  # the graph's output is in no scope: the value's producer casts it
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
    return Energy(
        scopes, pairs, tree, _tied_owners(problem), problem.island, _shielded_owners(problem) | set(functions)
    )


def _past_views(capture: Capture, users: dict[str, list[str]], name: str) -> list[str]:
    """Nodes that compute with a weight, buffer or input, or with a view of it."""

    def is_view(reader: str) -> bool:
        return bool(operation(capture.nodes[reader].op).view)

    readers = reach(users.get(name, ()), lambda reader: users.get(reader, ()) if is_view(reader) else ())
    return [reader for reader in readers if not is_view(reader)]


def _shielded_owners(problem: Problem) -> frozenset[str]:
    """Owners that the model's code always calls with autocast switched off."""
    if not problem.how.regional:
        return frozenset()
    nodes = problem.capture.nodes.values()
    free = {n.owner for n in nodes if n.region is None or n.region.enabled or len(n.calls) <= n.region.depth}
    return frozenset({node.owner for node in nodes} - free)


def _tied_owners(problem: Problem) -> set[tuple[str, str]]:
    """Pairs of owners that read or contain the same stored tensor, which can have only one precision."""
    kinds, deciding = problem.how.stores - {"input"}, problem.layout.deciding_owners
    stored = (place.name for place in problem.capture.placeholders if place.kind in kinds)
    return {pair for name in stored for pair in pairwise(deciding.get(name, ()))}
