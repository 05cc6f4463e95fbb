"""The search for plans: minimum cuts propose a choice by predictions; a replay accepts or rejects it, and corrects
predictions."""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from bisect import bisect
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import networkx as nx
from networkx.algorithms.flow import boykov_kolmogorov

from ..errors import first_line, let_through
from ..numerics.formats import runs
from ..records import Plan

MARGIN = 0.8
"""Share of the budget that a plan may use on the calibration inputs: other inputs may have larger errors."""

LITTLE = 0.01
"""Relative saving per step below which a search stops."""

WORTH = 0.002
"""Minimum relative saving by which one more low-precision module, or another strategy's choice, is adopted."""

MOST_OFF = 4.0
"""Largest factor by which errors are assumed to differ from predictions."""

FAR = 1.2
"""A choice is replayed if its expected error is up to this many times the limit: predictions may be too large."""

STRICTER = 0.95
"""After a choice exceeds the limit, the next choice's predicted error is at most this share of the last one's."""

MAX_VERIFICATIONS = 8
"""Maximum number of replays in one search."""

VISITS = 20_000
"""Maximum number of operations that one local search visits in total, which bounds the time for a large model."""

SHRINK = (0.9, 0.6, 0.25)
"""Largest factors of the error limit after the first, second and third plan whose artefact missed the budget. A near miss
needs little, and the last attempt should hold."""

ROUNDS = 1 + len(SHRINK)
"""Maximum number of attempts, each with a smaller error limit, to make a plan whose artefact meets the budget."""


class Arc(NamedTuple):
    """Price and squared error that are paid if the arc's tail is in low precision and its head is FP32."""

    tail: Hashable
    head: Hashable
    price: float
    square: float = 0.0


LOW, HIGH = ("low",), ("fp32",)
"""Source and sink of a network: tuples, so that they equal no module or operation name."""

Choice = frozenset[Any]
"""A choice of precisions, as the set of modules, functions or operations in FP32."""

FORBIDDEN = 1e6
"""Squared error charged for an unsafe node in low precision: above any budget, yet finite, so that cuts are exact."""


@dataclass(frozen=True)
class Candidate:
    """A choice of precisions. high: modules, functions or operations in FP32. cost: value of the objective. price: cost
    plus a charge for each change of precision; the search minimizes it. seconds: roofline time of one forward."""

    high: Choice
    predicted_error: float
    price: float
    cost: float = 0.0
    seconds: float = 0.0

    @property
    def feasible(self) -> bool:
        """Whether no unsafe or untested operation runs in low precision, and no operation gets two dtypes. An unsafe
        operation does not become safe by one run within the budget."""
        return self.predicted_error < math.sqrt(FORBIDDEN)


class Cuts:
    """Computes choices of precisions that minimize price + multiplier * squared error, each as a minimum cut.

    A cut can express this sum because every term of two owners only penalizes that their precisions differ. Source:
    Kolmogorov and Zabih, What energy functions can be minimized via graph cuts? (2004).
    """

    def __init__(self, arcs: Sequence[Arc], unit: float) -> None:
        """unit: the capacity of an arc, price + multiplier * squared error, is divided by `unit`."""
        self._arcs, self._unit = arcs, unit or 1.0
        self._nothing = frozenset(end for arc in arcs for end in arc[:2]) - {LOW}

    def best(self, multiplier: float) -> Choice:
        """The FP32 set that minimizes price + multiplier * squared error; of several minima, the smallest set.

        Capacities are integers, in units of 1e-18, so that the cut is exact and unique. Prohibitions have large, not
        infinite, capacities, so that a cut always exists.
        """
        capacities = Counter[tuple[Hashable, Hashable]]()
        for arc in self._arcs:
            capacities[arc.tail, arc.head] += round(min((arc.price + multiplier * arc.square) / self._unit, 1e9) * 1e18)
        network = nx.DiGraph()
        network.add_nodes_from((LOW, HIGH))
        network.add_edges_from((*ends, {"capacity": capacity}) for ends, capacity in capacities.items())
        return frozenset(nx.minimum_cut(network, LOW, HIGH, flow_func=boykov_kolmogorov)[1][1])

    def value(self, high: Choice) -> tuple[float, float]:
        """The total price and squared error of the arcs that a choice cuts."""
        paid = [arc for arc in self._arcs if arc.head in high and arc.tail not in high]
        return sum(arc.price for arc in paid), sum(arc.square for arc in paid)

    def towards(self, holds: Callable[[Choice], bool]) -> list[Choice]:
        """Choices from everything in low precision to everything in FP32: cuts that approach the limit from both sides.

        holds: whether a choice is within the limit; all FP32 always is. The next multiplier gives equal sums to the two
        choices nearest to the limit, so that each new cut lies between them.
        """
        over = self.best(0.0)
        within = self._nothing
        result = [over, within, frozenset({HIGH})]
        while not holds(over):
            cheap, wrong = self.value(over)  # (price, squared error)
            dear, right = self.value(within)
            if not (cheap < dear and right < wrong):
                break
            between = self.best((dear - cheap) / (wrong - right))
            if not cheap < self.value(between)[0] < dear:
                break
            result.append(between)
            if holds(between):
                within = between
            else:
                over = between
        return result

    def cheapest(
        self, made: Callable[[Choice], Candidate], allowed: float, groups: Sequence[Choice], size: int
    ) -> Candidate:
        """The cheapest choice found with a predicted error of at most `allowed`.

        A local search starts from every cut, and from the cut within the limit with more groups lowered; each of its
        steps changes one group. groups: sets that change to low precision together, the largest saving per squared error
        first. made: evaluates a choice. size: number of operations, which limits the choices that the search evaluates.
        """
        allowed = min(allowed, math.sqrt(FORBIDDEN) / 2)

        def rank(high: Choice) -> tuple[float, float]:
            """Sort key: the smaller, the better a choice."""
            point = made(high)
            return max(0.0, point.predicted_error - allowed), point.price

        visits = iter(range(VISITS // max(size, 1)))
        changes = [(group, Choice.difference) for group in groups]  # to low precision
        changes += [(group, Choice.union) for group in reversed(groups)]  # to FP32

        def downhill(high: Choice) -> Choice:
            """The choice after changes of one group each, as long as they improve it and visits are left."""
            idle = 0  # number of changes since the last improvement
            for group, change in itertools.cycle(changes):
                other = change(high, group)
                idle += 1
                if idle > len(changes):
                    break
                if other != high and next(visits, None) is None:
                    break
                if rank(other) < rank(high):
                    high = other
                    idle = 0
            return high

        cuts = self.towards(lambda high: made(high).predicted_error <= allowed)
        within = min(cuts, key=rank)
        over = min((cut for cut in cuts if rank(cut)[0]), key=rank, default=frozenset())

        # One more start: as many groups of the cut within the limit in low precision as the limit allows.
        pending = [group for group in groups if group <= within - over]
        counts = range(1, len(pending) + 1)
        count = bisect(counts, 0.0, key=lambda count: rank(within.difference(*pending[:count]))[0])
        cuts.append(within.difference(*pending[:count]))
        starts = sorted(dict.fromkeys(cuts), key=rank)
        return made(min(map(downhill, starts), key=rank))


@dataclass
class Energy:
    """Price + multiplier * squared error of a choice of precisions, as terms that a minimum cut can minimize.

    scopes: {owner: (price if low, price if FP32, squared error if low)}, prices in seconds. pairs: {(producer,
    consumer): (squared error, seconds) of the cast if both precisions differ}. tree: {owner: the owner
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
        """An owner (a module, or a function in it), and all owners that must have the same precision."""
        return self._tied_groups.get(owner, (owner,))

    @cached_property
    def _tied_groups(self) -> dict[str, tuple[str, ...]]:
        groups = nx.connected_components(nx.Graph(list(self.tied)))
        return {owner: tuple(sorted(group)) for group in groups for owner in group}

    def complete(self, high: Collection[str]) -> frozenset[str]:
        """All FP32 owners: the owners in `high`, all tied to these, and every shielded owner below an FP32 owner."""
        result = {*high, *(each for owner in self._tied_groups.keys() & high for each in self.together(owner))}
        for owner in self._shielded_below:
            if self.tree[owner] in result:
                result.add(owner)
        return frozenset(result)

    @cached_property
    def _shielded_below(self) -> list[str]:
        """Shielded owners with an owner above, outer ones first."""
        return sorted(self.shielded & self.tree.keys(), key=lambda path: path.count("."))

    def saving_of(self, owner: str) -> float:
        """Seconds saved if the operations directly in an owner run in low precision."""
        low, high, _ = self.scopes[owner]
        return high - low

    @cached_property
    def groups(self) -> list[frozenset[str]]:
        """Sets that change to low precision together: an owner, or an owner and all owners below, each with the owners
        that share a weight. The largest saving per squared error comes first."""

        def worth(group: frozenset[str]) -> float:
            square = sum(self.scopes[owner][2] for owner in group)
            saving = sum(map(self.saving_of, group))
            return saving / square if square else math.inf

        sets: list[set[str]] = [{owner} for owner in self.scopes]
        below = nx.DiGraph((above, owner) for owner, above in self.tree.items())
        for above in below:
            sets.append({above, *nx.descendants(below, above)})
        groups = set[frozenset[str]]()
        for owners in sets:
            tied = [self.together(owner) for owner in owners]
            groups.add(frozenset[str]().union(*tied))
        return sorted(groups, key=lambda group: (-worth(group), sorted(group)))

    @cached_property
    def cuts(self) -> Cuts:
        """The network of the minimum cut: a cut pays for an arc from a low-precision owner to an FP32 owner."""
        arcs = list[Arc]()
        for owner, (low, high, error) in self.scopes.items():
            arcs.append(Arc(owner, HIGH, low, error))
            arcs.append(Arc(LOW, owner, high))
        for (producer, consumer), (error, elapsed) in self.pairs.items():
            arcs.append(Arc(consumer, producer, elapsed, error))  # only FP32 to low rounds
            arcs.append(Arc(producer, consumer, elapsed))
        for owner, above in self.tree.items():
            arcs.append(Arc(owner, above, self.island))
            arcs.append(Arc(above, owner, self.island))
        arcs += [Arc(owner, other, math.inf) for owner, other in self.tied]
        arcs += [Arc(other, owner, math.inf) for owner, other in self.tied]
        for owner, above in self.tree.items():
            if owner in self.shielded:
                arcs.append(Arc(owner, above, math.inf))
        total = sum(low + high for low, high, _ in self.scopes.values())
        return Cuts(arcs, total)


class Space(ABC):
    """All choices for one plan. nothing: everything in FP32, which meets every limit. least: lower bound of all prices.
    log: {FP32 part of a choice: error of its replay}, inf if that raises, or if the artefact misses the budget.
    failures: {FP32 part of a choice: the message of a replay, or of the model, that raised}. missed: FP32 parts of the
    choices whose artefact ran, with an error beyond the budget."""

    nothing: Candidate
    least = 0.0

    def __init__(self) -> None:
        self.log: dict[Choice, float] = {}
        self.failures: dict[Choice, str] = {}
        self.missed: set[Choice] = set()

    @abstractmethod
    def propose(self, allowed: float) -> Candidate:
        """The cheapest choice with a predicted error of at most `allowed`."""

    @abstractmethod
    def replay(self, point: Candidate) -> float:
        """Error of a replay of the recorded graph under a choice. Raises: whatever an operation raises."""

    def error(self, point: Candidate) -> float:
        """Error of a choice's replay, cached."""
        if point.high not in self.log:
            try:
                self.log[point.high] = self.replay(point)
            except Exception as error:
                let_through(error)
                self.log[point.high], self.failures[point.high] = math.inf, first_line(error)
        return self.log[point.high]

    def within_budget(self) -> list[Candidate]:
        """Choices of precisions that are known, before any search, to meet the error budget."""
        return []


def choose(space: Space, limit: float) -> Candidate:
    """The cheapest choice found whose replay has an error of at most `limit`.

    Each replay corrects the predictions for the next proposal, so that few are needed. If no choice is predicted to
    meet the limit, one replay tests this prediction.
    """
    best = min((*space.within_budget(), space.nothing), key=lambda point: point.price)
    correction, ceiling = 1.0, math.inf
    for number in range(MAX_VERIFICATIONS):
        most = best.price if best == space.nothing else (1 - LITTLE) * best.price
        hopes = (1.0, FAR, math.inf) if number == 0 and best == space.nothing else (1.0, FAR)
        points = (space.propose(min(hope * limit / correction, ceiling)) for hope in hopes if space.least < most)
        point = next((point for point in points if point.price < most), None)
        if point is None:
            break
        error = space.error(point)
        if math.isfinite(error) and point.predicted_error:
            correction = min(max(error / point.predicted_error, 1 / MOST_OFF), MOST_OFF)
        if error <= limit:
            best = point
        else:
            is_near = math.isfinite(error) or point.high in space.missed
            ceiling = point.predicted_error * (STRICTER if is_near else 0.5)
    return best


def find_verified(
    spaces: Mapping[str, Space],
    max_error: float,
    make: Callable[[Mapping[str, float]], Mapping[str, Candidate]],
    verify: Callable[[Mapping[str, Candidate]], Mapping[str, Plan]],
) -> dict[str, Plan]:
    """Return for every search space a plan that meets the budget when run, or that torch cannot run; if there is
    none, the last plan tried.

    make: returns choices with errors within the limits. If a choice's plan misses the budget, a new choice is made with
    a smaller limit: multiplied by MARGIN * budget / error, at most the round's SHRINK, or by 0.25 if the run failed or had no error. The
    error is the worst of the run, with gradients and at changed weights too.
    """
    limits, plans = dict.fromkeys(spaces, MARGIN * max_error), dict[str, Plan]()
    for shrink in (*SHRINK, 0.0):
        made = make(limits)
        plans |= verify(made)
        missed = [name for name in made if made[name] != spaces[name].nothing and not plans[name].is_verified]
        limits = {name: limits[name] for name in missed if runs(plans[name].format)}
        for name in limits:
            _note_miss(spaces[name], made[name], plans[name])
            ran = plans[name].verification
            error = ran.worst_error if ran is not None else math.inf
            is_near = 0.0 < error < math.inf  # a run that failed, or that another criterion refuses, tells no distance
            limits[name] *= min(shrink, MARGIN * max_error / error) if is_near else 0.25
        if not limits:
            break
    return plans


def _note_miss(space: Space, point: Candidate, plan: Plan) -> None:
    """Record that the artefact of a choice missed the budget, so that the choice is not proposed again."""
    space.log[point.high] = math.inf
    if plan.measured_error is not None:
        space.missed.add(point.high)
    if (ran := plan.verification) is not None and ran.failure:
        space.failures[point.high] = ran.failure
