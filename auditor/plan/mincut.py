"""Minimum cuts, and a search for the cheapest choice of precisions within an error limit."""

from __future__ import annotations

import itertools
import math
from bisect import bisect
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import networkx as nx
from networkx.algorithms.flow import boykov_kolmogorov


class Arc(NamedTuple):
    """Price and squared error that are paid if the arc's tail is in low precision and its head is FP32."""

    tail: Hashable
    head: Hashable
    price: float
    square: float = 0.0


LOW, HIGH = ("low",), ("fp32",)
"""Source and sink of a network: tuples, so that they equal no module or operation name."""

Choice = frozenset[Any]
"""A choice of precisions: the set of modules, functions or operations in FP32."""

FORBIDDEN = 1e6
"""Squared error charged for running an unsafe node low: above any budget, yet finite, so that cuts are exact."""


@dataclass(frozen=True)
class Candidate:
    """A choice of precisions. high: its FP32 modules, functions or operations; seconds: roofline time of one forward;
    low_flops: share of the FLOPs in low precision.

    cost: value of the objective; for time, including the price of stored weights. price: cost plus the price of each
    change of precision.
    """

    high: Choice
    predicted_error: float
    price: float
    cost: float = 0.0
    seconds: float = 0.0
    low_flops: float = 0.0

    @property
    def feasible(self) -> bool:
        """Whether no unsafe or untested operation runs in low precision and none gets two dtypes. A single run within
        the budget does not make such an operation safe."""
        return self.predicted_error < math.sqrt(FORBIDDEN)


class Cuts:
    """Choices that minimize price + multiplier * squared error, each a minimum cut.

    A cut expresses this sum because every term of two owners only penalizes different precisions.
    Source: Kolmogorov and Zabih, What energy functions can be minimized via graph cuts? (2004).
    """

    def __init__(self, arcs: Sequence[Arc], unit: float) -> None:
        """unit: prices and errors are divided by this price."""
        self._arcs, self._unit = arcs, unit or 1.0
        self._nothing = frozenset(end for arc in arcs for end in arc[:2]) - {LOW}

    def best(self, multiplier: float) -> Choice:
        """The FP32 set at the minimum for a multiplier; of equal minima, the smallest set.

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
        """The price and the squared error of a choice."""
        paid = [arc for arc in self._arcs if arc.head in high and arc.tail not in high]
        return sum(arc.price for arc in paid), sum(arc.square for arc in paid)

    def towards(self, holds: Callable[[Choice], bool]) -> list[Choice]:
        """Cuts between all low and all FP32. The last two are neighbors: one exceeds the limit, the other is within it.

        holds: whether a choice is within the limit; all FP32 always is. For the next multiplier the current two choices
        have equal value, so that each new cut lies between them. If the cut for multiplier 0 holds: that cut, twice.
        """
        passed, over, within = list[Choice](), self.best(0.0), self._nothing
        while not holds(over):
            (cheap, wrong), (dear, right) = self.value(over), self.value(within)
            between = self.best((dear - cheap) / (wrong - right)) if cheap < dear and right < wrong else over
            if not cheap < self.value(between)[0] < dear:
                return [*passed, over, within]
            if holds(between):
                passed, within = [*passed, within], between
            else:
                passed, over = [*passed, over], between
        return [over, over]

    def cheapest(
        self, made: Callable[[Choice], Candidate], allowed: float, groups: Sequence[Choice], tries: int
    ) -> Candidate:
        """The cheapest choice found with a predicted error of at most `allowed`.

        A local search starts from the cuts, and from the last cut within the limit with more groups lowered. Each of
        its steps changes one group. groups: sets that change to low precision together, the largest saving per squared error first.
        made: evaluates a choice. tries: how many choices the local search may evaluate.
        """

        def rank(high: Choice) -> tuple[float, float]:
            point = made(high)
            return max(0.0, point.predicted_error - allowed), point.price

        *passed, over, within = self.towards(lambda high: made(high).predicted_error <= allowed)
        between = within - over
        pending = [group for group in groups if group <= between]
        count = bisect(range(1, len(pending) + 1), 0.0, key=lambda count: rank(within.difference(*pending[:count]))[0])
        lowers = ((group, Choice.difference) for group in groups)
        changes = [*lowers, *((group, Choice.union) for group in reversed(groups))]
        cuts = dict.fromkeys(
            (*passed, over, within, within.difference(*pending[:count]), frozenset({HIGH}), self._nothing)
        )
        left = iter(range(tries))

        def downhill(high: Choice) -> Choice:
            height, idle = rank(high), 0
            for group, change in itertools.cycle(changes):
                if idle == len(changes):
                    break
                idle += 1
                if (other := change(high, group)) == high:
                    continue
                if next(left, None) is None:
                    break
                if (lower := rank(other)) < height:
                    high, height, idle = other, lower, 0
            return high

        return made(min(map(downhill, sorted(cuts, key=rank)), key=rank))
