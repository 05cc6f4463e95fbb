"""The user's own score decides beside the budget: which plan is recommended, what is said, and it is what a run by hand
gives."""

import copy
import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import auditor
from auditor.errors import AuditorError
from auditor.records import Audit, Score
from auditor.report.plans import score_words
from auditor.report.view import ReportView
from tests.support.refusing import refused

INPUTS = torch.linspace(-2, 2, 64 * 8).reshape(64, 8).sin()


def model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)).eval()


@torch.no_grad()
def expected() -> Tensor:
    return model()(INPUTS)


def near(limit: float) -> Callable[[nn.Module], Iterator[Tensor]]:
    """Which samples are answered to within a limit, relative to their own size."""

    def function(net: nn.Module) -> Iterator[Tensor]:
        for x, y in zip(INPUTS.split(16), expected().split(16), strict=True):
            yield (net(x).float() - y).norm(dim=1) <= limit * y.norm(dim=1)

    return function


def audited(function: Any, **how: Any) -> Audit:
    return auditor.audit(model(), INPUTS[:8], evaluate=function, **how)


@pytest.fixture(scope="module")
def told_apart() -> Audit:
    """BF16 answers few samples to within 1e-3 of their size, FP16 all; either holds the budget."""
    return audited(near(1e-3), max_drop=0.05)


def by_hand(audit: Audit, name: str, function: Callable[[nn.Module], Iterator[Tensor]]) -> list[float]:
    patched = auditor.apply(copy.deepcopy(model()), audit, name=name)
    with auditor.emulate("cuda"), torch.no_grad():
        return [float(x) for batch in function(patched) for x in batch]


def test_scores_are_what_a_run_by_hand_gives(told_apart: Audit) -> None:
    assert (told_apart.evaluation.score, told_apart.evaluation.samples, told_apart.evaluation.calls) == (1.0, 64, 4)
    for name, plan in told_apart.plans.items():
        values = by_hand(told_apart, name, near(1e-3))
        assert plan.is_verified
        assert plan.score.value == statistics.fmean(values)
        assert plan.score.difference == statistics.fmean(values) - 1.0
        assert plan.score.standard_error == pytest.approx(statistics.stdev(x - 1.0 for x in values) / math.sqrt(64))


def test_a_plan_that_loses_too_much_is_not_recommended(told_apart: Audit) -> None:
    passed = {name: plan.score.passed for name, plan in told_apart.plans.items() if plan.score}
    assert passed == {"autocast_fp16": True, "autocast_bf16": False, "cast_fp16": True, "cast_bf16": False}
    assert str(told_apart.recommended).endswith("fp16")
    alone = audited(near(1e-3), max_drop=0.05, formats=("fp8_e4m3", "bf16"))
    assert alone.recommended is None
    expected = "Keep the model in FP32: no plan within the error budget of 0.01 keeps the score within --max-drop."
    assert ReportView(alone).headline == expected
    assert "--max-drop" in ReportView(alone).proof


def test_a_function_that_fails_on_a_plan_alone_costs_that_plan() -> None:
    def choosy(net: nn.Module) -> float:
        with torch.no_grad():
            answer = net(INPUTS)
        if answer.dtype is torch.bfloat16:
            raise ValueError("no bfloat16 here")
        return float(answer.float().mean())

    found = audited(choosy, strategies="autocast")
    failures = {name: plan.score.failure for name, plan in found.plans.items() if plan.score}
    assert failures["autocast_fp16"] is None
    assert "ValueError: no bfloat16 here (test_scores.py:" in str(failures["autocast_bf16"])
    assert str(found.recommended).endswith("fp16")


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (lambda net: math.nan, "is nan"),
        (lambda net: float(net.half()(INPUTS.half()).mean()), "the function changed the model"),
    ],
)
def test_one_that_gives_nothing_in_fp32_ends_the_audit_before_it_begins(function: Any, why: str) -> None:
    stages: list[str] = []
    with refused(AuditorError, "no-score", match=f"gives no score of the model in FP32: .*{why}"):
        audited(function, progress=lambda stage, *rest: stages.append(stage))
    assert set(stages) == {"FP32 score"}


def test_a_model_stored_low_is_scored_in_fp32_and_half_inputs_reach_it() -> None:
    def answers(net: nn.Module) -> list[float]:
        return net(INPUTS.half()).float().flatten().tolist()

    half = model().half()
    found = auditor.audit(half, INPUTS[:8].half(), evaluate=answers, formats="fp16", strategies="autocast")
    raised = copy.deepcopy(half).float()(INPUTS.half().float())
    assert found.evaluation.score == pytest.approx(raised.mean().item(), rel=1e-5)


FAILS = "(standard error 0.001); fails, since at most"


@pytest.mark.parametrize(
    ("score", "evaluation", "words"),
    [
        (Score(0.5, 0.0, 0.0, True), {}, "0.5, as in FP32 (standard error 0); passes"),
        (Score(0.5, 0.0, None, None), {"max_drop": None}, "0.5, as in FP32"),
        (Score(0.5, 0.25, None, True), {}, "0.5, 0.25 better; passes"),
        (Score(0.5, 0.25, None, False), {"better": "lower"}, "0.5, 0.25 worse; fails, since at most 0.05 is allowed"),
        (Score(0.5, -0.0501, 0.001, False), {}, f"0.5, 0.0501 worse {FAILS} 0.05 is allowed; so close"),
        (Score(0.5, -0.1, 0.001, False), {"max_drop": 0.0}, f"0.5, 0.1 worse {FAILS} 0 is allowed"),
        (Score(None, passed=False, failure="it raised"), {}, "no score: it raised"),
    ],
)
def test_what_is_said_of_a_score(told_apart: Audit, score: Score, evaluation: Any, words: str) -> None:
    assert score_words(replace(told_apart.evaluation, **evaluation), score).startswith(words)
