"""What scopes and the values between them are charged, on graphs of two and five layers."""

from __future__ import annotations

import pytest

from auditor.plan.costs import Cost, cast_seconds, seconds
from auditor.plan.problem import Problem
from auditor.records import Contribution, Verdict
from tests.support.problems import captured

COST = Cost(10**9, 10**4, False)
LOW, HIGH = seconds(COST, "fp16", "A100"), seconds(COST, "fp32", "A100")


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
    assert (low, high) == (pytest.approx(LOW), pytest.approx(HIGH))
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
