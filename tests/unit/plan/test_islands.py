"""What an island costs, against roofline times worked out by hand."""

from __future__ import annotations

import random

import pytest

from auditor.plan.choices import savings
from auditor.plan.costs import seconds
from auditor.plan.solve import evaluate
from tests.problems import drawn


def test_cost_is_the_time_its_own_operations_would_save() -> None:
    problem = drawn("chain", "cast", random.Random(0), unsafe=0.0)
    owners = {node.owner for node in problem.capture.nodes.values()}
    chosen = evaluate(problem, {"": "fp32", **dict.fromkeys(owners, "fp32")})
    found = savings(problem, chosen)
    assert found.keys() == chosen.precision.keys()
    for owner in owners:
        names = [name for name, node in problem.capture.nodes.items() if node.owner == owner]
        saved = sum(
            seconds(problem.costs[name], "fp32", problem.device) - seconds(problem.costs[name], "fp16", problem.device)
            for name in names
        )
        assert found[owner] == pytest.approx(saved / chosen.seconds)
    assert sum(found.values()) > 0


def test_what_is_low_already_saves_nothing() -> None:
    problem = drawn("chain", "cast", random.Random(0), unsafe=0.0)
    owners = {node.owner for node in problem.capture.nodes.values()}
    chosen = evaluate(problem, {"": "fp16", **dict.fromkeys(owners, "fp16")})
    assert set(savings(problem, chosen).values()) == {0.0}
