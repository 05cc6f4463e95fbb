"""Cuts of random networks against networkx, whose algorithm is another one."""

import random

import networkx as nx
import pytest

from auditor.plan.network import Network

HUGE = 10**27  # beyond 64 bits


def random_arcs(rnd: random.Random, nodes: int, most: int) -> list[tuple[object, object, int]]:
    """Arcs between random nodes, in both directions and several times, some of them without capacity."""
    names = ["source", "sink", *range(nodes)]
    count = rnd.randrange(8 * nodes)
    return [(rnd.choice(names), rnd.choice(names), rnd.randrange(-1, most)) for _ in range(count)]


def cut_of_networkx(arcs: list[tuple[object, object, int]]) -> frozenset[object]:
    """The nodes from which the sink can still be reached once the flow is largest."""
    graph = nx.DiGraph()
    graph.add_nodes_from(("source", "sink"))
    for tail, head, capacity in arcs:
        known = graph.get_edge_data(tail, head, {"capacity": 0})["capacity"]
        graph.add_edge(tail, head, capacity=known + max(capacity, 0))
    return frozenset(nx.minimum_cut(graph, "source", "sink")[1][1])


@pytest.mark.parametrize("most", [2, 5, HUGE])  # small capacities make ties
def test_the_smallest_side_of_the_sink_is_found(most: int) -> None:
    for seed in range(100):
        rnd = random.Random(seed)
        arcs = random_arcs(rnd, rnd.randrange(1, 12), most)
        network = Network("source", "sink")
        for arc in arcs:
            network.add(*arc)
        assert network.sink_side() == cut_of_networkx(arcs)


def test_a_chain_of_thousands_is_no_recursion() -> None:
    network = Network(0, 3000)
    for node in range(3000):
        network.add(node, node + 1, 1 + (node == 1000))
    assert network.sink_side() == frozenset({3000})
    network = Network(0, 3000)
    for node in range(3000):
        network.add(node, node + 1, 2 - (node == 1000))
    assert network.sink_side() == frozenset(range(1001, 3001))
