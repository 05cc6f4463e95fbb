"""What operations cost: views nothing, and a reshape that no strides can express as much as the copy it makes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import Tensor, nn

from auditor.plan.costs import Cost, cast_seconds, costs_of, memory_of, seconds
from auditor.plan.problem import Problem
from auditor.records import Capture, Contribution, Memory, Verdict
from tests.support.capturing import Function
from tests.support.problems import NOTHING, captured
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
    cost = costs_of(capture)[only(capture, packet).name]
    assert cost.free is free
    assert (seconds(cost, "fp32") == 0) is free
    assert cost.elements == 2 * 24  # read and written


class Chain(nn.Module):
    """x [8, 16] -> [8, 64] -> a view of it -> relu -> [8, 4]."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(16, 64, bias=False), nn.Linear(64, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.narrow(self.wide(x).reshape(8, 64).relu())


WEIGHTS = 16 * 64 + 64 * 4  # numbers


def memory_under(capture: Capture, strategy: str, labels: dict[str, str]) -> Memory:
    every = [*capture.nodes, *(placeholder.name for placeholder in capture.placeholders)]
    verdicts = dict.fromkeys(capture.nodes, Verdict("safe", ""))
    problem = Problem(capture, costs_of(capture), dict.fromkeys(every, NOTHING), verdicts, strategy, "fp16", "A100")
    return memory_of(capture, problem.costs, problem.resolve(lambda owner: labels.get(owner, "fp32")), problem.format)


LOW = {"": "fp16", "wide": "fp16", "narrow": "fp16"}


@pytest.mark.parametrize(
    ("strategy", "labels", "weights", "activations"),
    [
        # the input of 8 * 16 is the caller's; the peak is relu: what it reads and what it makes, 8 * 64 each
        ("cast", {}, 4 * WEIGHTS, 4 * (128 + 512 + 512)),
        ("cast", LOW, 2 * WEIGHTS, 2 * (128 + 512 + 512)),
        # FP32 input; the low copies of input and weight, 2 * (128 + 1024), beside the 2 * 512 of the first product
        ("autocast", LOW, 4 * WEIGHTS, 4 * 128 + 2 * (128 + 1024) + 2 * 512),
        # the root lowers the input; the island's weight is FP32, and its FP32 result lies beside the low copy of it
        ("cast", {**LOW, "wide": "fp32"}, 4 * 1024 + 2 * 256, 2 * 128 + 4 * 512 + 2 * 512),
    ],
)
def test_weights_and_the_peak_by_hand(strategy: str, labels: dict[str, str], weights: int, activations: int) -> None:
    assert memory_under(capture_of(Chain(), normal(8, 16)), strategy, labels) == Memory(weights, activations)


COST = Cost(10**9, 10**4, False)
CHEAP, DEAR = seconds(COST, "fp16", "A100"), seconds(COST, "fp32", "A100")


def problem(kind: str, strategy: str, unsafe: tuple[str, ...] = ()) -> Problem:
    """Every node costs the same; own errors are 0.3, casts 0.04 for values and 0.02 for weights and inputs."""
    capture = captured(kind)
    contributions = {name: Contribution(0.5, 0.3, 0.04) for name in capture.nodes}
    contributions |= {place.name: Contribution(0.0, 0.0, 0.02) for place in capture.placeholders}
    verdicts = {name: Verdict("unsafe" if name in unsafe else "safe", "") for name in capture.nodes}
    return Problem(capture, dict.fromkeys(capture.nodes, COST), contributions, verdicts, strategy, "fp16", "A100")


@pytest.mark.parametrize("strategy", ["autocast", "cast"])
def test_a_layer_is_charged_its_own_error_and_its_weights(strategy: str) -> None:
    found = problem("chain", strategy).energy
    low, high, error = found.scopes["2"]
    assert (low, high) == (pytest.approx(CHEAP), pytest.approx(DEAR))
    assert error == pytest.approx(0.3**2 + 2 * 0.02**2)  # weight and bias


@pytest.mark.parametrize("strategy", ["autocast", "cast"])
def test_neighbours_exchange_one_value(strategy: str) -> None:
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


def test_who_reads_a_tied_weight_depends_on_who_holds_it() -> None:
    found = problem("held", "cast").energy
    assert (found.tied, found.held) == ({("body.0", "last")}, {("body.0", "shared")})
    assert found.scopes["shared"] == (0.0, 0.0, 0.0)
    assert found.tree["shared"] == ""
    under_autocast = problem("held", "autocast").energy
    assert (under_autocast.held, "shared" in under_autocast.scopes) == (set(), False)


def test_who_is_shielded_by_the_authors_region() -> None:
    # `careful` switches autocast off inside of its own call: a scope around it changes nothing there
    assert problem("shielded", "autocast").energy.shielded == {"router"}
    assert problem("shielded", "cast").energy.shielded == frozenset()
