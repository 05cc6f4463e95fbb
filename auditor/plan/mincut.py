"""A minimum cut of a network with whole capacities, by pushing a preflow downhill towards the sink."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from typing import Generic, TypeVar

Node = TypeVar("Node", bound=Hashable)


class Network(Generic[Node]):
    """Arcs that are cut once, or again with other capacities. Several between two nodes add up.

    They are held in pairs: arc `i` and the one back along it, arc `i ^ 1`. Node 0 is the source, node 1 the sink.
    """

    def __init__(self, arcs: Iterable[tuple[Node, Node]], source: Node, sink: Node) -> None:
        self._numbers: dict[Node, int] = {source: 0, sink: 1}
        self._leaving: list[list[int]] = [[], []]
        self._heads: list[int] = []
        self._places: list[int] = []
        known: dict[tuple[int, int], int] = {}
        for ends in arcs:
            tail, head = (self._numbers.setdefault(node, len(self._numbers)) for node in ends)
            if (tail, head) not in known:
                known[tail, head], known[head, tail] = len(self._heads), len(self._heads) + 1
                self._add(tail, head)
            self._places.append(known[tail, head])
        self._left: list[int] = []

    def _add(self, tail: int, head: int) -> None:
        while len(self._leaving) < len(self._numbers):
            self._leaving.append([])
        self._leaving[tail].append(len(self._heads))
        self._leaving[head].append(len(self._heads) + 1)
        self._heads += (head, tail)

    def sink_side(self, capacities: Sequence[int]) -> set[Node]:
        """The nodes on the sink's side of a minimum cut, the sink among them; of equal cuts, the one with the fewest there.

        capacities: of the arcs as they were given. Source: Goldberg and Tarjan, A new approach to the maximum-flow problem
        (1988), its first phase: whatever cannot reach the sink any more keeps its excess, since only the cut is asked for.
        """
        self._left = [0] * len(self._heads)
        for place, capacity in zip(self._places, capacities, strict=True):
            self._left[place] += capacity
        heights = self._drained()
        return {node for node, number in self._numbers.items() if number == 1 or heights[number] < len(heights)}

    def _drained(self) -> list[int]:
        """Push all that reaches the sink there; then every node's distance to it, the number of nodes where it is cut off."""
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
        """Push a node's excess to lower neighbours, lifting it until none is left or it is cut off; how often it was lifted."""
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
        """Arcs from each node to the sink along which something may still flow; the source counts as cut off."""
        heads, left, count = self._heads, self._left, len(self._leaving)
        found, waiting = [count] * count, deque([1])
        found[1] = 0
        while waiting:
            node = waiting.popleft()
            further = found[node] + 1
            for arc in self._leaving[node]:
                tail = heads[arc]
                if found[tail] == count and tail and left[arc ^ 1]:
                    found[tail] = further
                    waiting.append(tail)
        return found
