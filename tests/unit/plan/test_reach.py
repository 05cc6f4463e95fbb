"""The smallest error within reach of plans that run nothing low: of all single modules, and of everything low."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from auditor.plan.choices import as_plan, everything
from auditor.plan.modules import Modules
from auditor.plan.reach import with_reach
from auditor.plan.solve import evaluate
from auditor.records import Baseline
from tests.planning import bench_of

ALL_LOW = Baseline(0.5, True)


class Two(nn.Module):
    """Two layers of one size, the second of which reads numbers of which FP16 keeps few digits."""

    def __init__(self):
        super().__init__()
        self.fine, self.poor = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x):
        return self.fine(x) + self.poor(x + 1000.0) - self.poor(torch.full_like(x, 1000.0))


@pytest.fixture(scope="module")
def bench():
    torch.manual_seed(0)
    return bench_of(Two(), torch.randn(64, 64), formats=("fp16",))


@pytest.fixture(scope="module")
def problem(bench):
    return bench.problem("autocast", "fp16")


def reach(bench, plan, baseline=ALL_LOW):
    return with_reach(bench, {plan.name: plan}, {plan.name: baseline})[plan.name].reach


def test_the_module_that_does_least_harm_is_run_alone(bench, problem):
    def alone(owner: str) -> float:
        point = evaluate(problem, {other: "fp16" if other == owner else "fp32" for other in problem.energy.scopes})
        return Modules(problem, bench.trial(bench.subject.batches), bench.max_error).error(point)

    found = reach(bench, as_plan(problem, everything(problem, "fp32")))
    assert found == alone("fine") < alone("poor") < ALL_LOW.measured_error


def test_everything_low_counts_where_it_is_closer(bench, problem):
    assert reach(bench, as_plan(problem, everything(problem, "fp32")), Baseline(1e-9, True)) == 1e-9


def test_quickly_nothing_is_run(bench, problem):
    quick = replace(bench, quick=True)
    assert reach(quick, as_plan(problem, everything(problem, "fp32"))) == ALL_LOW.measured_error
    assert reach(quick, as_plan(problem, everything(problem, "fp32")), Baseline(None, False)) is None
    assert reach(quick, as_plan(problem, everything(problem, "fp32")), Baseline(math.inf, True)) is None


def test_a_plan_with_anything_low_has_an_error_of_its_own(bench, problem):
    assert reach(bench, as_plan(problem, everything(problem, "fp16"))) is None
