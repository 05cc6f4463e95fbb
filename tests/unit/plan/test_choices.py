"""Choices with names, and choices as plans: the table of scopes, what a plan gains."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from auditor.execution.policy import choice_from_scopes
from auditor.plan.modules import as_plan, everything, scopes_of
from auditor.plan.problem import Problem
from auditor.plan.solve import evaluate
from auditor.records import ScopeChoice
from tests.support.problems import drawn, owners_of


@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data())
@pytest.mark.parametrize("kind", ["chain", "branches", "tied"])
def test_the_table_of_scopes_says_what_was_chosen_and_no_more(kind: str, data: st.DataObject) -> None:
    problem = drawn(kind, "autocast", random.Random(0), unsafe=0.0)
    owners = owners_of(problem.capture)
    labels = {owner: data.draw(st.sampled_from(["fp16", "fp32"]), label=owner) for owner in owners}
    chosen = evaluate(problem, labels)
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
    return scopes_of(problem, evaluate(problem, labels))


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
    plan = as_plan(problem, everything(problem, fmt))
    assert plan.target == device
    assert word in plan.note
    assert bool(word) == bool(plan.note)
    assert plan.predicted_speedup == pytest.approx(plan_times(problem, "fp32") / plan_times(problem, fmt))


def plan_times(problem: Problem, precision: str) -> float:
    return evaluate(problem, dict.fromkeys(owners_of(problem.capture), precision)).seconds
