"""Choices with names, and choices as plans: the table of scopes, what a plan gains."""

import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from auditor.execution.policy import choice_from_scopes, plain
from auditor.plan.costs import Cost
from auditor.plan.mincut import FORBIDDEN
from auditor.plan.modules import as_plan, evaluate, scopes_of
from auditor.plan.problem import Problem
from auditor.records import Contribution, ScopeChoice, Verdict
from tests.support.problems import captured, drawn, fp32_of, owners_of, problem_of
from tests.support.subjects import capture_of, normal


@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data())
@pytest.mark.parametrize("kind", ["chain", "branches", "tied"])
def test_the_table_of_scopes_says_what_was_chosen_and_no_more(kind: str, data: st.DataObject) -> None:
    problem = drawn(kind, "autocast", random.Random(0), unsafe=0.0)
    owners = owners_of(problem.capture)
    labels = {owner: data.draw(st.sampled_from(["fp16", "fp32"]), label=owner) for owner in owners}
    chosen = evaluate(problem, fp32_of(labels))
    scopes = scopes_of(problem, chosen)
    precision = choice_from_scopes(scopes)
    assert {owner: precision(owner) for owner in owners} == labels
    assert "" in scopes
    for path, choice in scopes.items():
        above = {other: kept for other, kept in scopes.items() if other != path}
        assert path == "" or choice_from_scopes(above)(path) != choice.precision  # each line is needed


def low(owners: str) -> dict[str, str]:
    """The root and these layers in FP16."""
    return {"": "fp16", **dict.fromkeys(owners, "fp16")}


def plan_of(problem: Problem, labels: dict[str, str]) -> dict[str, ScopeChoice]:
    return scopes_of(problem, evaluate(problem, fp32_of(labels)))


def test_an_island_keeps_its_result_where_only_fp32_reads_it() -> None:
    problem = drawn("chain", "cast", random.Random(0), unsafe=0.0)
    end = plan_of(problem, {**low("0123"), "4": "fp32"})
    assert end["4"].output == "keep"  # the model's output: nothing low reads it
    middle = plan_of(problem, {**low("0134"), "2": "fp32"})
    assert middle["2"].output == "cast"
    pair = plan_of(problem, {**low("014"), "2": "fp32", "3": "fp32"})
    assert (pair["2"].output, pair["3"].output) == ("keep", "cast")


@pytest.mark.parametrize(
    ("device", "fmt", "word"), [("T4", "bf16", "no BF16"), ("T4", "fp16", ""), ("H100", "bf16", "")]
)
def test_a_plan_is_made_for_a_device(device: str, fmt: str, word: str) -> None:
    problem = replace(drawn("chain", "autocast", random.Random(3), unsafe=0.0), device=device, format=fmt)
    plan = as_plan(problem, evaluate(problem, ()))
    assert plan.target == device
    assert word in plan.note
    assert bool(word) == bool(plan.note)
    assert plan.predicted_speedup == pytest.approx(plan_times(problem, "fp32") / plan_times(problem, fmt))


def plan_times(problem: Problem, precision: str) -> float:
    return evaluate(problem, owners_of(problem.capture) if precision == "fp32" else ()).seconds


# What the solver weighs: prohibitions, squares of errors, and which values are rounded.


def problem(strategy: str = "autocast", verdict: str = "safe", own: float = 0.3) -> Problem:
    each = Contribution(0.5, own, 0.04)
    return problem_of(captured("chain"), strategy, each=each, cost=Cost(10**9, 10**4, False), verdict=verdict)


@pytest.mark.parametrize(
    ("verdict", "own", "low", "wide"),
    [
        ("safe", 0.3, 0.09, 0.0),
        ("sensitive", 0.3, 0.09, 0.0),
        ("unsafe", 0.3, FORBIDDEN, 0.0),
        ("untested", 0.3, FORBIDDEN, 0.0),
        ("safe", float("inf"), FORBIDDEN, 0.0),  # cuts need finite numbers
    ],
)
def test_what_running_a_node_low_adds(verdict: str, own: float, low: float, wide: float) -> None:
    found = problem(verdict=verdict, own=own)
    (name, *_) = found.capture.nodes
    assert found.node_square(found.resolve(plain("fp16")), name) == pytest.approx(low)
    assert found.node_square(found.resolve(plain("fp32")), name) == wide


def test_a_node_without_a_verdict_is_not_forbidden() -> None:
    found = replace(problem(), verdicts={})
    (name, *_) = found.capture.nodes
    assert not found.is_forbidden(found.resolve(plain("fp16")), name)


def test_values_that_are_rounded() -> None:
    found = problem()
    (x,) = (place.name for place in found.capture.placeholders if place.kind == "input")
    weights = {place.name for place in found.capture.placeholders if place.kind == "parameter"}
    assert set(found.rounded_values(found.resolve(plain("fp16")))) == weights | {x}
    assert found.rounded_values(found.resolve(plain("fp32"))) == []
    assert found.cast_square(found.resolve(plain("fp16")), x) == pytest.approx(0.04**2)
    cast = problem("cast")
    assert set(cast.rounded_values(cast.resolve(plain("fp16")))) == weights | {x}


def test_what_the_author_runs_low_himself_no_plan_forbids() -> None:
    """Region.first runs in BF16: it counts with what was measured in BF16, so does what enters it, and an FP16 verdict
    is none of it."""
    capture = capture_of(Region(), normal(4, 4))
    names = [*capture.nodes, *(place.name for place in capture.placeholders)]
    fp16, bf16 = (dict.fromkeys(names, Contribution(0.5, own, 10 * own)) for own in (0.3, 0.02))
    unsafe = dict.fromkeys(capture.nodes, Verdict("unsafe", ""))
    costs = dict.fromkeys(capture.nodes, Cost(10**9, 10**4, False))
    found = Problem(capture, costs, {"fp16": fp16, "bf16": bf16}, unsafe, "autocast", "fp16", "A100")
    first, second = (node.name for node in capture.nodes.values() if node.op == "aten.linear.default")
    low, wide = found.resolve(plain("fp16")), found.resolve(plain("fp32"))
    assert [found.node_square(each, first) for each in (low, wide)] == pytest.approx([0.02**2, 0.02**2])
    assert [found.node_square(each, second) for each in (low, wide)] == [FORBIDDEN, 0.0]
    (x,) = (place.name for place in capture.placeholders if place.kind == "input")
    assert found.cast_square(low, x) == pytest.approx(0.2**2)
    assert (
        found.energy.scopes["first"][0] == found.energy.scopes["first"][1]
    )  # no time is saved by running it in low precision
    assert found.energy.scopes["second"][0] < found.energy.scopes["second"][1]


class Region(nn.Module):
    """Two products, the first in a region of BF16."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            y = self.first(x)
        result: Tensor = self.second(y.float())
        return result
