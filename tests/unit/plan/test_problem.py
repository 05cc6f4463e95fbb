"""What the solver weighs: prohibitions, squares of errors, and which values are rounded."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from auditor.execution.policy import plain
from auditor.plan.costs import Cost
from auditor.plan.energy import FORBIDDEN
from auditor.plan.problem import Problem
from auditor.records import Contribution, Verdict
from tests.support.problems import captured
from tests.support.subjects import capture_of, normal


def problem(strategy: str = "autocast", verdict: str = "safe", own: float = 0.3) -> Problem:
    capture = captured("chain")
    names = [*capture.nodes, *(place.name for place in capture.placeholders)]
    return Problem(
        capture,
        dict.fromkeys(capture.nodes, Cost(10**9, 10**4, False)),
        dict.fromkeys(names, Contribution(0.5, own, 0.04)),
        dict.fromkeys(capture.nodes, Verdict(verdict, "")),
        strategy,
        "fp16",
        "A100",
    )


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
    assert not found.forbidden(found.resolve(plain("fp16")), name)


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
    found = Problem(capture, costs, fp16, unsafe, "autocast", "fp16", "A100", elsewhere={"fp16": fp16, "bf16": bf16})
    first, second = (node.name for node in capture.nodes.values() if node.op == "aten.linear.default")
    low, wide = found.resolve(plain("fp16")), found.resolve(plain("fp32"))
    assert [found.node_square(each, first) for each in (low, wide)] == pytest.approx([0.02**2, 0.02**2])
    assert [found.node_square(each, second) for each in (low, wide)] == [FORBIDDEN, 0.0]
    (x,) = (place.name for place in capture.placeholders if place.kind == "input")
    assert found.cast_square(low, x) == pytest.approx(0.2**2)
    assert found.energy.scopes["first"][0] == found.energy.scopes["first"][1]  # no time is saved by lowering it
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
