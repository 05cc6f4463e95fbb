"""The cut that minimises time and error, on energies of one to three scopes whose minima are found by hand."""

from __future__ import annotations

import random

import networkx as nx
import pytest

from auditor.plan.energy import FORBIDDEN, Energy
from auditor.plan.mincut import HIGH, Network


class Cut(Energy):
    """An energy whose cuts are told by what is FP32."""

    def cut(self, multiplier: float) -> set[object]:
        return set(self.cuts.best(multiplier) - {HIGH})


ROOT = (0.0, 10.0, 0.0)
"""A root that is low for nothing and costs ten seconds in FP32."""


def energy(
    scopes: dict[str, tuple[float, float, float]],
    pairs: dict[tuple[str, str], tuple[float, float]] | None = None,
    tree: dict[str, str] | None = None,
    tied: set[tuple[str, str]] | None = None,
    held: set[tuple[str, str]] | None = None,
    island: float = 0.0,
    shielded: frozenset[str] = frozenset(),
) -> Cut:
    return Cut({"": ROOT, **scopes}, pairs or {}, tree or {}, tied or set(), held or set(), island, shielded)


def test_what_is_tied_agrees() -> None:
    # together 2 + m low against 6 in FP32; b alone would be low at any m
    found = energy({"a": (1.0, 3.0, 1.0), "b": (1.0, 3.0, 0.0)}, tied={("a", "b")})
    assert (found.cut(3.9), found.cut(4.1)) == (set(), {"a", "b"})
    assert (found.together("b"), found.together("")) == (("a", "b"), ("",))


def test_a_shielded_scope_is_low_with_the_one_above_it_alone() -> None:
    tree, shielded = {"a": "", "a.s": "a"}, frozenset({"a.s"})
    scopes = {"a": (0.0, 1.0, FORBIDDEN), "a.s": (1.0, 100.0, 0.0)}
    assert energy(scopes, tree=tree, shielded=shielded).cut(1.0) == {"a", "a.s"}
    assert energy(scopes, tree=tree).cut(1.0) == {"a"}
    scopes = {"a": (0.0, 1.0, 0.0), "a.s": (0.0, 1.0, FORBIDDEN)}
    assert energy(scopes, tree=tree, shielded=shielded).cut(1.0) == {"a.s"}


def test_settling_goes_down_the_tree() -> None:
    tree = {"a": "", "a.s": "a", "a.s.t": "a.s", "b": ""}
    found = energy({}, tree=tree, shielded=frozenset({"a.s", "a.s.t", "b"}))
    given = {"": "fp16", "a": "fp32", "a.s": "fp16", "a.s.t": "fp16", "b": "fp16"}
    assert found.settled(given) == {"": "fp16", "a": "fp32", "a.s": "fp32", "a.s.t": "fp32", "b": "fp16"}


def test_a_holder_follows_a_low_owner_and_else_the_one_above() -> None:
    free = energy(
        {"reader": (1.0, 9.0, 0.0), "holder": (0.0, 0.0, 0.0)}, tree={"holder": ""}, held={("reader", "holder")}
    )
    low = {"": "fp32", "reader": "fp16", "holder": "fp32"}
    assert free.settled(low) == {"": "fp32", "reader": "fp16", "holder": "fp16"}
    high = {"": "fp16", "reader": "fp32", "holder": "fp32"}
    assert free.settled(high) == {"": "fp16", "reader": "fp32", "holder": "fp16"}
    busy = energy(
        {"reader": (1.0, 9.0, 0.0), "holder": (0.0, 2.0, 0.0)}, tree={"holder": ""}, held={("reader", "holder")}
    )
    assert busy.settled(high) == high


Arcs = list[tuple[str, str, int]]


def oracle(arcs: Arcs) -> set[str]:
    graph = nx.DiGraph()
    graph.add_nodes_from("st")
    for tail, head, capacity in arcs:
        known = graph.get_edge_data(tail, head, {"capacity": 0})["capacity"]
        graph.add_edge(tail, head, capacity=known + capacity)
    return set(nx.minimum_cut(graph, "s", "t")[1][1])


def sink_side(arcs: Arcs) -> set[object]:
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
