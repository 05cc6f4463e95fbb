"""A minimum cut of a network with whole capacities, by pushing a preflow downhill towards the sink."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable
from typing import TypeVar

Node = TypeVar("Node", bound=Hashable)


def sink_side(arcs: Iterable[tuple[Node, Node, int]], source: Node, sink: Node) -> set[Node]:
    """The nodes on the sink's side of a minimum cut, the sink among them; of equal cuts, the one with the fewest there.

    arcs: (tail, head, capacity), none negative; several between two nodes add up.
    Source: Goldberg and Tarjan, A new approach to the maximum-flow problem (1988), its first phase: whatever cannot
    reach the sink any more keeps its excess, since only the cut is asked for.
    """
    numbers = {source: 0, sink: 1}
    network = _Network()
    for tail, head, capacity in arcs:
        start = numbers.setdefault(tail, len(numbers))
        network.add(start, numbers.setdefault(head, len(numbers)), capacity)
    heights = network.drained()
    return {node for node, number in numbers.items() if number < len(heights) and heights[number] < len(heights)} | {
        sink
    }


class _Network:
    """Arcs in pairs: arc `i` and what may flow back along it, arc `i ^ 1`. Node 0 is the source, node 1 the sink."""

    def __init__(self) -> None:
        self._heads: list[int] = []
        self._left: list[int] = []
        self._leaving: list[list[int]] = [[], []]

    def add(self, tail: int, head: int, capacity: int) -> None:
        """An arc, with nothing flowing back along it yet."""
        while len(self._leaving) <= max(tail, head):
            self._leaving.append([])
        for start, end, amount in ((tail, head, capacity), (head, tail, 0)):
            self._leaving[start].append(len(self._heads))
            self._heads.append(end)
            self._left.append(amount)

    def drained(self) -> list[int]:
        """Push all that reaches the sink there; then every node's distance to it, the number of nodes where it is cut off."""
        count = len(self._leaving)
        excess, active = [0] * count, deque[int]()
        for arc in self._leaving[0]:
            self._push(arc, self._left[arc], excess)
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
        count, lifted = len(heights), 0
        while True:
            lowest = count
            for arc in self._leaving[node]:
                if not self._left[arc]:
                    continue
                head = self._heads[arc]
                if heights[head] != heights[node] - 1:
                    lowest = min(lowest, heights[head] + 1)
                    continue
                if head > 1 and not excess[head]:
                    active.append(head)
                self._push(arc, min(excess[node], self._left[arc]), excess)
                if not excess[node]:
                    return lifted
            heights[node], lifted = lowest, lifted + 1
            if lowest >= count:
                return lifted

    def _push(self, arc: int, amount: int, excess: list[int]) -> None:
        self._left[arc] -= amount
        self._left[arc ^ 1] += amount
        excess[self._heads[arc]] += amount
        excess[self._heads[arc ^ 1]] -= amount

    def _distances(self) -> list[int]:
        """Arcs from each node to the sink along which something may still flow; the source counts as cut off."""
        count = len(self._leaving)
        found, waiting = [count] * count, deque([1])
        found[1] = 0
        while waiting:
            node = waiting.popleft()
            for arc in self._leaving[node]:
                tail = self._heads[arc]
                if tail and found[tail] == count and self._left[arc ^ 1]:
                    found[tail] = found[node] + 1
                    waiting.append(tail)
        return found
