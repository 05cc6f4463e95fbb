"""Minimum cuts by push-relabel, and a search for the cheapest choice of precisions within an error limit."""

from __future__ import annotations

import itertools
import math
from bisect import bisect
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple


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
        self._network = Network([(arc.tail, arc.head) for arc in arcs], LOW, HIGH)

    def best(self, multiplier: float) -> Choice:
        """The FP32 set at the minimum for a multiplier; of equal minima, the smallest set.

        Capacities are integers, in units of 1e-18, so that the cut is exact and unique. Prohibitions have large, not
        infinite, capacities, so that a cut always exists.
        """
        shares = ((arc.price + multiplier * arc.square) / self._unit for arc in self._arcs)
        return frozenset(self._network.sink_side([round(min(share, 1e9) * 1e18) for share in shares]))

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
        its steps changes one group. groups: sets that are lowered together, the largest saving per squared error first.
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


class Network:
    """A flow network that can be cut repeatedly, with other capacities. Parallel arcs add up.

    Arcs are stored in pairs: arc `i` and its reverse, arc `i ^ 1`. Node 0 is the source, node 1 the sink.
    """

    def __init__(self, arcs: Iterable[tuple[Hashable, Hashable]], source: Hashable, sink: Hashable) -> None:
        self._numbers: dict[Hashable, int] = {source: 0, sink: 1}
        self._heads: list[int] = []
        self._places: list[int] = []
        known: dict[tuple[int, int], int] = {}
        for ends in arcs:
            tail, head = (self._numbers.setdefault(node, len(self._numbers)) for node in ends)
            if (tail, head) not in known:
                known[tail, head], known[head, tail] = len(self._heads), len(self._heads) + 1
                self._heads += (head, tail)
            self._places.append(known[tail, head])
        self._leaving: list[list[int]] = [[] for _ in self._numbers]
        for arc in range(len(self._heads)):
            self._leaving[self._heads[arc ^ 1]].append(arc)
        self._left: list[int] = []

    def sink_side(self, capacities: Sequence[int]) -> set[Hashable]:
        """The nodes on the sink's side of a minimum cut, including the sink; of equal cuts, the one with the fewest
        such nodes.

        capacities: one per arc, in the constructor's order. Source: Goldberg and Tarjan, A new approach to the
        maximum-flow problem (1988). Only the first phase runs: the cut is known before excess that cannot reach the
        sink returns to the source.
        """
        self._left = [0] * len(self._heads)
        for place, capacity in zip(self._places, capacities, strict=True):
            self._left[place] += capacity
        heights = self._push_to_sink()
        return {node for node, number in self._numbers.items() if number == 1 or heights[number] < len(heights)}

    def _push_to_sink(self) -> list[int]:
        """Push as much flow as possible to the sink; returns each node's distance to it (the node count if cut off)."""
        count = len(self._leaving)
        excess, active = [0] * count, deque[int]()
        for arc in self._leaving[0]:
            excess[self._heads[arc]] += self._left[arc]
            self._left[arc ^ 1] += self._left[arc]
            self._left[arc] = 0
        heights = self._distances()
        active.extend(node for node in range(2, count) if excess[node] and heights[node] < count)
        lifted = 0
        while active:
            node = active.popleft()
            lifted += self._discharge(node, heights, excess, active)
            if lifted > count or not active:
                lifted, heights = 0, self._distances()
                active = deque(node for node in range(2, count) if excess[node] and heights[node] < count)
        return heights

    def _discharge(self, node: int, heights: list[int], excess: list[int], active: deque[int]) -> int:
        """Push a node's excess to lower neighbors, relabeling the node as needed; returns the number of relabels."""
        heads, left, arcs = self._heads, self._left, self._leaving[node]
        count, lifted, mine = len(heights), 0, excess[node]
        while True:
            lowest, below = count, heights[node] - 1
            for arc in arcs:
                if not (room := left[arc]):
                    continue
                head = heads[arc]
                if (height := heights[head]) != below:
                    if height < lowest:
                        lowest = height + 1
                    continue
                if head > 1 and not excess[head]:
                    active.append(head)
                amount = room if room < mine else mine
                left[arc] = room - amount
                left[arc ^ 1] += amount
                excess[head] += amount
                mine -= amount
                if not mine:
                    excess[node] = 0
                    return lifted
            heights[node], lifted = lowest, lifted + 1
            if lowest >= count:
                excess[node] = mine
                return lifted

    def _distances(self) -> list[int]:
        """Residual arcs from each node to the sink; the number of nodes for the source and for unreachable nodes."""
        heads, left, count = self._heads, self._left, len(self._leaving)
        result, waiting = [count] * count, deque([1])
        result[1] = 0
        while waiting:
            node = waiting.popleft()
            further = result[node] + 1
            for arc in self._leaving[node]:
                tail = heads[arc]
                if result[tail] == count and tail and left[arc ^ 1]:
                    result[tail] = further
                    waiting.append(tail)
        return result
