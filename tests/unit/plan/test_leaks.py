"""The lowest choice there is without conflicts, on models that make FP32 values of their own."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from auditor.plan.costs import Cost
from auditor.plan.leaks import lowest
from auditor.plan.problem import Problem
from auditor.plan.solve import evaluate
from auditor.records import Contribution, Verdict
from tests.problems import captured
from tests.subjects import capture_of, normal
from tests.unet import UNet

COST = Cost(10**9, 10**4, False)


class Late(nn.Module):
    """The root makes an FP32 value, and two layers meet it one behind the other."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.third(self.second(self.first(x) + torch.arange(4).float().sin()))


def problem_of(model: nn.Module | None, *inputs: Tensor, strategy: str = "cast") -> Problem:
    capture = captured("chain") if model is None else capture_of(model, *inputs)
    contributions = dict.fromkeys(capture.nodes, Contribution(1e-3, 1e-3, 1e-3))
    verdicts = dict.fromkeys(capture.nodes, Verdict("safe", ""))
    return Problem(capture, dict.fromkeys(capture.nodes, COST), contributions, verdicts, strategy, "fp16", "A100")


def test_where_nothing_conflicts_everything_is_low() -> None:
    found = lowest(problem_of(None))
    assert found.raised == {}
    assert all(found.resolution.low(name) for name in captured("chain").nodes)


def test_the_maker_of_an_fp32_value_is_raised_and_what_lies_behind_is_low() -> None:
    found = lowest(problem_of(UNet(), normal(1, 3, 8, 8), torch.tensor([3])))
    assert list(found.raised) == ["time"]
    assert not found.resolution.conflicts
    low = {name for name in found.resolution.dtypes if found.resolution.low(name)}
    assert {"conv2d", "cat_1", "cat_2", "linear_1"} <= low


def test_its_readers_are_raised_where_that_leaves_less_time() -> None:
    # with the root in FP32 the sine, the sum and the three layers' casts are all that is not low
    found = lowest(problem_of(Late(), normal(2, 4)))
    assert not found.resolution.conflicts
    assert len(found.raised) == 1


def test_under_autocast_nothing_conflicts() -> None:
    problem = problem_of(UNet(), normal(1, 3, 8, 8), torch.tensor([3]), strategy="autocast")
    assert problem.lowest.raised == {}


@pytest.mark.parametrize("objective", ["time", "memory", "flops"])
def test_the_lowest_choice_is_cheaper_than_fp32_by_every_objective(objective: str) -> None:
    problem = replace(problem_of(UNet(), normal(1, 3, 8, 8), torch.tensor([3])), objective=objective)
    owners = problem.energy.scopes
    low = evaluate(problem, {owner: "fp32" if owner == "time" else "fp16" for owner in owners})
    assert low.cost < 0.7 * evaluate(problem, dict.fromkeys(owners, "fp32")).cost
