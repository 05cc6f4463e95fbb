"""The chosen plan against the best of all there are, by the same prices and predicted errors."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from auditor.artefact.strategies import SHIPPED as STRATEGIES
from auditor.plan.costs import Cost
from auditor.plan.problem import Problem
from auditor.plan.search import choose
from auditor.plan.solve import Candidate, evaluate
from auditor.plan.workbench import Workbench
from auditor.records import Capture, Contribution, Verdict
from tests.support.planning import Foretold, bench_of, searched
from tests.support.problems import drawn, labellings, owners_of, tied_owners
from tests.support.small_models import ConvNet
from tests.support.subjects import capture_of, normal, seeded
from tests.support.unet import UNet

NO_TRIAL: Any = None
BUDGETS = (1e-4, 1e-3, 3e-3, 1e-2, 3e-2)


def chosen(problem: Problem, budget: float) -> Candidate:
    """What the search takes where every run comes out as predicted."""
    return choose(Foretold(problem, budget), budget)


def every_choice(problem: Problem) -> list[Candidate]:
    ties = tied_owners(problem.capture) if problem.strategy == "cast" else []
    pairs = [pair for group in ties for pair in itertools.pairwise(group)]
    allowed = (x for x in labellings(owners_of(problem.capture)) if all(x[a] == x[b] for a, b in pairs))
    return [evaluate(problem, labels) for labels in allowed]


def assert_near_the_best(problem: Problem) -> None:
    everything = every_choice(problem)
    for budget in BUDGETS:
        least = min(point.price for point in everything if point.predicted_error <= budget)
        found = chosen(problem, budget)
        assert found.predicted_error <= budget
        assert found.price <= 1.01 * least, budget


@settings(max_examples=2, deadline=None, derandomize=True)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("kind", ["chain", "branches", "tied", "towers"])
@given(rnd=st.integers(0, 2**32).map(random.Random))
def test_the_chosen_plan_is_within_one_percent_of_the_best(kind: str, strategy: str, rnd: random.Random) -> None:
    assert_near_the_best(drawn(kind, strategy, rnd))


def drawn_for(capture: Capture, strategy: str, rnd: random.Random) -> Problem:
    """A real graph, its costs and errors drawn over decades."""

    def contribution() -> Contribution:
        isolated = 10 ** rnd.uniform(-5, -1.5)
        return Contribution(isolated, isolated * rnd.random(), isolated * rnd.random())

    names = [*capture.nodes, *(placeholder.name for placeholder in capture.placeholders)]
    errors = {name: contribution() for name in names}
    verdicts = dict.fromkeys(capture.nodes, Verdict("safe", ""))
    costs = {name: Cost(int(10 ** rnd.uniform(6, 12)), int(10 ** rnd.uniform(3, 7)), False) for name in capture.nodes}
    return Problem(capture, costs, errors, verdicts, strategy, "fp16", "A100")


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_also_on_a_model_with_containers(strategy: str) -> None:
    capture = capture_of(seeded(ConvNet), normal(2, 3, 8, 8))
    assert_near_the_best(drawn_for(capture, strategy, random.Random(1)))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1))
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_also_with_fourteen_scopes(strategy: str, seed: int) -> None:
    layers: list[nn.Module] = [nn.Sequential(nn.Linear(4, 4), nn.GELU()) for _ in range(6)]
    capture = capture_of(nn.Sequential(*layers, nn.LayerNorm(4)), normal(2, 4))
    assert len(owners_of(capture)) == 14
    assert_near_the_best(drawn_for(capture, strategy, random.Random(seed)))


@pytest.fixture(scope="module")
def unet() -> Workbench:
    return bench_of(seeded(UNet), normal(1, 3, 16, 16), torch.tensor([17]))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("budget", [0.008])
def test_a_unet_comes_near_what_a_long_search_finds(unet: Workbench, strategy: str, budget: float) -> None:
    problem = unet.problem(strategy, "bf16")
    fp32 = evaluate(problem, dict.fromkeys(problem.energy.scopes, "fp32"))
    found, best = chosen(problem, budget), searched(problem, budget, 400)
    assert found.predicted_error <= budget
    assert fp32.seconds / found.seconds >= 0.95 * fp32.seconds / best.seconds


def test_what_meets_the_embedding_of_a_unet_does_not_stay_fp32(unet: Workbench) -> None:
    # only the angles, made in FP32 from whole numbers, cannot be low beside low weights
    problem = unet.problem("cast", "fp16")
    found = chosen(problem, 0.008)
    assert {owner.partition(".")[0] for owner, precision in found.precision.items() if precision == "fp32"} == {"time"}
