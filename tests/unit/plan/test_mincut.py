"""Minimum cuts against networkx, and by hand where several are equal."""

from __future__ import annotations

import random

import networkx as nx
import pytest

from auditor.plan.mincut import Network

Arcs = list[tuple[str, str, int]]


def oracle(arcs: Arcs) -> set[str]:
    graph = nx.DiGraph()
    graph.add_nodes_from("st")
    for tail, head, capacity in arcs:
        known = graph.get_edge_data(tail, head, {"capacity": 0})["capacity"]
        graph.add_edge(tail, head, capacity=known + capacity)
    return set(nx.minimum_cut(graph, "s", "t")[1][1])


def sink_side(arcs: Arcs) -> set[str]:
    return Network([(tail, head) for tail, head, _ in arcs], "s", "t").sink_side([capacity for *_, capacity in arcs])


def drawn(seed: int) -> Arcs:
    rnd = random.Random(seed)
    inner = [str(index) for index in range(rnd.randint(0, 12))]
    pairs = [(a, b) for a in ["s", *inner] for b in [*inner, "t"] if a != b and rnd.random() < 0.4]
    return [(a, b, rnd.choice((0, 1, 2, 10**18, 10**27))) for a, b in (*pairs, *rnd.sample(pairs, len(pairs) // 3))]


@pytest.mark.parametrize("seed", range(30))
def test_a_network_is_cut_again_with_other_capacities_as_one_of_its_own(seed: int) -> None:
    arcs, rnd = drawn(seed), random.Random(seed)
    network = Network([(tail, head) for tail, head, _ in arcs], "s", "t")
    for _ in range(3):
        capacities = [rnd.choice((0, 1, 2, 10**18, 10**27)) for _ in arcs]
        others = [(tail, head, capacity) for (tail, head, _), capacity in zip(arcs, capacities, strict=True)]
        assert network.sink_side(capacities) == sink_side(others) == oracle(others)


def test_of_equal_cuts_the_one_with_the_fewest_on_the_sinks_side() -> None:
    assert sink_side([("s", "a", 1), ("a", "b", 1), ("b", "t", 1)]) == {"t"}
    assert sink_side([("s", "a", 1), ("a", "b", 2), ("b", "t", 2)]) == {"a", "b", "t"}


def test_nothing_flows_where_no_arc_leads() -> None:
    assert sink_side([]) == {"t"}
    assert sink_side([("a", "t", 3), ("b", "a", 0)]) == {"a", "t"}
