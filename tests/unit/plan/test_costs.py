"""What operations cost: views nothing, and a reshape that no strides can express as much as the copy it makes."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from auditor.plan.costs import Cost, cast_seconds, costs_of, memory_of, seconds
from auditor.plan.problem import Problem
from auditor.plan.search import FORBIDDEN, HIGH, LOW, VISITS, Arc, Candidate, Choice, Cuts, Energy
from auditor.records import Contribution, MemoryUse
from tests.support.capturing import Function
from tests.support.problems import captured, problem_of
from tests.support.small_models import narrowing
from tests.support.subjects import capture_of, normal, only


@pytest.mark.parametrize(
    ("function", "packet", "free"),
    [
        (lambda x: x.exp().reshape(-1), "reshape", True),
        (lambda x: x.exp().t().reshape(-1), "reshape", False),
        (lambda x: x.exp().flatten(), "flatten", True),
        (lambda x: x.exp().t().flatten(), "flatten", False),
        (lambda x: x.exp().t(), "t", True),
        (lambda x: x.exp().movedim(0, 1), "movedim", True),
        (lambda x: nn.functional.dropout(x.exp(), 0.5, training=True), "dropout", False),
    ],
)
def test_a_reshape_is_free_unless_it_has_to_copy(function: Callable[[Tensor], Tensor], packet: str, free: bool) -> None:
    capture = capture_of(Function(function), normal(4, 6))
    cost = costs_of(capture.graph_module.graph)[only(capture, packet).name]
    assert cost.free is free
    assert (seconds(cost, "fp32", "A100") == 0) is free
    assert cost.elements == 2 * 24  # read and written


@pytest.mark.parametrize(
    ("function", "packet"),
    [
        (lambda x: x.exp().new_ones(3) + x.sum(), "new_ones"),
        (lambda x: torch.zeros_like(x.exp()[0, :3]) + x.sum(), "zeros_like"),
    ],
)
def test_a_tensor_that_only_takes_anothers_dtype_reads_none_of_its_values(
    function: Callable[[Tensor], Tensor], packet: str
) -> None:
    capture = capture_of(Function(function), normal(4, 6))
    cost = costs_of(capture.graph_module.graph)[only(capture, packet).name]
    assert cost.elements == 3  # written


WEIGHTS = 16 * 64 + 64 * 4  # numbers


ALL_LOW = {"": "fp16", "wide": "fp16", "narrow": "fp16"}


@pytest.mark.parametrize(
    ("strategy", "labels", "weights", "activations"),
    [
        # the input of 8 * 16 is the caller's; the peak is relu: what it reads and what it makes, 8 * 64 each
        ("cast", {}, 4 * WEIGHTS, 4 * (128 + 512 + 512)),
        ("cast", ALL_LOW, 2 * WEIGHTS, 2 * (128 + 512 + 512)),
        # FP32 input; the low copies of input and weight, 2 * (128 + 1024), beside the 2 * 512 of the first product
        ("autocast", ALL_LOW, 4 * WEIGHTS, 4 * 128 + 2 * (128 + 1024) + 2 * 512),
        # the root lowers the input; the island's weight is FP32, and its FP32 result lies beside the low copy of it
        ("cast", {**ALL_LOW, "wide": "fp32"}, 4 * 1024 + 2 * 256, 2 * 128 + 4 * 512 + 2 * 512),
    ],
)
def test_weights_and_the_peak_by_hand(strategy: str, labels: dict[str, str], weights: int, activations: int) -> None:
    found = problem_of(capture_of(narrowing(), normal(8, 16)), strategy)
    resolution = found.resolve(lambda owner: labels.get(owner, "fp32"))
    assert memory_of(found.capture, found.costs, resolution, found.format) == MemoryUse(weights, activations)


COST = Cost(10**9, 10**4, False)
CHEAP, DEAR = seconds(COST, "fp16", "A100"), seconds(COST, "fp32", "A100")


def problem(kind: str, strategy: str) -> Problem:
    """Every node costs the same; own errors are 0.3, casts 0.04 for values and 0.02 for weights and inputs."""
    found = problem_of(captured(kind), strategy, each=Contribution(0.5, 0.3, 0.04), cost=COST)
    given = {place.name: Contribution(0.0, 0.0, 0.02) for place in found.capture.placeholders}
    return replace(found, contributions={"fp16": {**found.contributions["fp16"], **given}})


@pytest.mark.parametrize("strategy", ["autocast", "cast"])
def test_a_layer_is_charged_its_own_error_and_its_weights(strategy: str) -> None:
    found = problem("chain", strategy).energy
    low, high, error = found.scopes["2"]
    assert (low, high) == (pytest.approx(CHEAP), pytest.approx(DEAR))
    assert error == pytest.approx(0.3**2 + 2 * 0.02**2)  # weight and bias


@pytest.mark.parametrize("strategy", ["autocast", "cast"])
def test_neighbors_exchange_one_value(strategy: str) -> None:
    found = problem("chain", strategy).energy
    assert {pair for pair in found.pairs if "" not in pair} == {("0", "1"), ("1", "2"), ("2", "3"), ("3", "4")}
    error, elapsed = found.pairs["1", "2"]
    assert error == pytest.approx(0.04**2)
    assert elapsed == pytest.approx(cast_seconds(2 * 4, "fp16", "A100"))  # [2, 4]
    assert found.tree == dict.fromkeys("01234", "")


def test_under_autocast_the_readers_of_an_input_share_its_rounding() -> None:
    found = problem("towers", "autocast").energy
    for tower in ("left", "right"):
        assert found.scopes[tower][2] == pytest.approx(0.3**2 + 2 * 0.02**2 + 0.02**2 / 2)
    assert found.scopes[""] == (0.0, 0.0, 0.0)


def test_under_cast_the_root_rounds_the_input() -> None:
    found = problem("towers", "cast").energy
    assert found.scopes[""][2] == pytest.approx(0.02**2)
    assert found.scopes["left"][2] == pytest.approx(0.3**2 + 2 * 0.02**2)
    assert {pair for pair in found.pairs if pair[0] == ""} == {("", "left"), ("", "right")}


def test_a_weight_stored_once_ties_its_readers() -> None:
    assert problem("tied", "cast").energy.tied == {("first", "last")}
    assert problem("tied", "autocast").energy.tied == set()


def test_who_holds_a_tied_weight_is_as_who_reads_it() -> None:
    """Of the one that is never called nothing but the weight is there: it takes no time, and is stored as the others'."""
    found = problem("held", "cast").energy
    assert set(found.together("shared")) == {"body.0", "last", "shared"}
    assert found.scopes["shared"] == (0.0, 0.0, 0.0)
    assert found.tree["shared"] == ""
    under_autocast = problem("held", "autocast").energy
    assert (under_autocast.tied, "shared" in under_autocast.scopes) == (set(), False)


def test_who_is_shielded_by_the_authors_region() -> None:
    # `careful` switches autocast off inside of its own call: a scope around it changes nothing there
    assert problem("shielded", "autocast").energy.shielded == {"router"}
    assert problem("shielded", "cast").energy.shielded == frozenset()


# The cut that minimizes time and error, on energies of one to three scopes whose minima are found by hand.


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
    island: float = 0.0,
    shielded: frozenset[str] = frozenset(),
) -> Cut:
    return Cut({"": ROOT, **scopes}, pairs or {}, tree or {}, tied or set(), island, shielded)


def test_a_shielded_scope_is_low_with_the_one_above_it_alone() -> None:
    tree, shielded = {"a": "", "a.s": "a"}, frozenset({"a.s"})
    scopes = {"a": (0.0, 1.0, FORBIDDEN), "a.s": (1.0, 100.0, 0.0)}
    assert energy(scopes, tree=tree, shielded=shielded).cut(1.0) == {"a", "a.s"}
    assert energy(scopes, tree=tree).cut(1.0) == {"a"}
    scopes = {"a": (0.0, 1.0, 0.0), "a.s": (0.0, 1.0, FORBIDDEN)}
    assert energy(scopes, tree=tree, shielded=shielded).cut(1.0) == {"a.s"}


def test_fp32_goes_down_the_tree() -> None:
    tree = {"a": "", "a.s": "a", "a.s.t": "a.s", "b": ""}
    found = energy({}, tree=tree, shielded=frozenset({"a.s", "a.s.t", "b"}))
    assert found.complete({"a"}) == {"a", "a.s", "a.s.t"}


def sink_side(arcs: list[Arc]) -> set[object]:
    return set(Cuts(arcs, 1.0).best(0.0))


def test_of_equal_cuts_the_one_with_the_fewest_on_the_sinks_side() -> None:
    assert sink_side([Arc(LOW, "a", 1), Arc("a", "b", 1), Arc("b", HIGH, 1)]) == {HIGH}
    assert sink_side([Arc(LOW, "a", 1), Arc("a", "b", 2), Arc("b", HIGH, 2)]) == {"a", "b", HIGH}


def test_arcs_between_the_same_nodes_add_up_and_no_arc_is_no_flow() -> None:
    assert sink_side([Arc(LOW, "a", 1), Arc(LOW, "a", 1), Arc("a", HIGH, 2), Arc("a", HIGH, 1)]) == {"a", HIGH}
    assert sink_side([]) == {HIGH}
    assert sink_side([Arc("a", HIGH, 3), Arc("b", "a", 0)]) == {"a", HIGH}


def test_between_two_cuts_as_many_groups_are_lowered_as_the_limit_allows() -> None:
    worth = {"a": 4.0, "b": 3.0, "c": 2.0}  # the same saving per squared error, so that cuts lower all or nothing
    cuts = Cuts([arc for x, n in worth.items() for arc in (Arc(LOW, x, n), Arc(x, HIGH, 0.0, n))], 1.0)

    def made(high: Choice) -> Candidate:
        price = sum(n for x, n in worth.items() if x in high)
        return Candidate(high & worth.keys(), (sum(worth.values()) - price) ** 0.5, price)

    found = cuts.cheapest(made, 7.5**0.5, [frozenset(x) for x in worth], size=2 * VISITS)
    assert (found.high, found.price) == ({"c"}, 2.0)
