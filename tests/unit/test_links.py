"""What is reached and what hangs together is what a library of graphs says, on graphs drawn at random."""

from __future__ import annotations

import random

import networkx as nx
import pytest

from auditor.links import both_ways, parts, reached, steps


def drawn(seed: int) -> tuple[list[tuple[int, int]], list[int]]:
    """Pairs of up to 30 names, with loops and doubles, and names that may be in none."""
    draw = random.Random(seed)
    names = range(draw.randint(2, 30))
    return [(draw.choice(names), draw.choice(names)) for _ in range(draw.randint(0, 40))], list(names[::3])


@pytest.mark.parametrize("seed", range(20))
def test_it_is_what_networkx_says(seed: int) -> None:
    pairs, alone = drawn(seed)
    one_way, undirected = nx.DiGraph(), nx.Graph()
    for graph in (one_way, undirected):
        graph.add_nodes_from(alone)
        graph.add_edges_from(pairs)
    assert {name: list(to) for name, to in steps(pairs, alone).items()} == {
        name: list(one_way.successors(name)) for name in one_way
    }
    assert {name: set(to) for name, to in both_ways(pairs, alone).items()} == {
        name: set(undirected[name]) for name in undirected
    }
    assert parts(both_ways(pairs, alone)) == list(nx.connected_components(undirected))
    for start in one_way:
        assert reached(steps(pairs, alone), [start, "not there"]) == {start, *nx.descendants(one_way, start)}


def test_names_come_in_the_order_of_the_first_pair() -> None:
    assert [*steps([(3, 1), (2, 3)], alone=[7])] == [7, 3, 1, 2]
    assert [*both_ways([(3, 1), (2, 3)])[3]] == [1, 2]
    assert parts(both_ways([(3, 1), (5, 4), (2, 3)])) == [{1, 2, 3}, {4, 5}]
