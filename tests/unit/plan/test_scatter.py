"""An output of few numbers is judged by several runs, since one may be accurate by chance."""

import copy
import math
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import auditor
from auditor.isolation.weights import change_weights
from auditor.plan.scatter import DRAWS, are_few


class Loss(nn.Module):
    """A contrastive model whose only output is its loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        logits = 50 * F.normalize(self.a(x), dim=-1) @ F.normalize(self.b(y), dim=-1).T
        return F.cross_entropy(logits, torch.arange(len(x)))


def error_by_hand(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> float:
    low = copy.deepcopy(model).bfloat16()
    with torch.no_grad(), auditor.emulate("cuda"):
        exact, ours = model(x, y), low(x.bfloat16(), y.bfloat16())
    return abs(float(ours) - float(exact)) / abs(float(exact))


def changed(model: nn.Module, seed: int) -> nn.Module:
    result = copy.deepcopy(model)
    change_weights(result, seed, frozen=True)
    return result


@cache
def lucky() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """A model whose single error is at most a fifth of the usual one."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(64, 32, generator=generator)
    y = x + 0.3 * torch.randn(64, 32, generator=generator)
    base = Loss().eval()
    errors = {seed: error_by_hand(changed(base, seed), x, y) for seed in range(20, 60)}
    seed = min(errors, key=lambda one: errors[one])
    assert errors[seed] < sorted(errors.values())[20] / 5
    return changed(base, seed), x, y


def test_a_plan_is_not_verified_by_a_number_that_agrees_by_chance() -> None:
    model, x, y = lucky()
    usual = math.sqrt(sum(error_by_hand(changed(model, seed), x, y) ** 2 for seed in range(1, DRAWS + 1)) / DRAWS)
    single = error_by_hand(model, x, y)
    budget = math.sqrt(single * usual)
    before = copy.deepcopy(model.state_dict())
    audit = auditor.audit(model, (x, y), formats=["bf16"], strategies=["cast"], max_error=budget)
    baseline: Any = audit.baselines["cast_bf16"]
    assert single < budget < usual
    assert not baseline.holds
    assert baseline.scattered == pytest.approx(usual, rel=1e-3)
    assert baseline.measured_error == pytest.approx(single, rel=1e-3)
    assert baseline.worst_error == baseline.scattered
    plan = audit.plans["cast_bf16"]
    assert plan.verification is None or not plan.holds or plan.kept_modules
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())


def test_the_verdict_says_that_several_runs_decide() -> None:
    model, x, y = lucky()
    audit = auditor.audit(model, (x, y), formats=["bf16"], strategies=["cast"], max_error=0.5)
    assert audit.recommended == "cast_bf16"
    assert "the root mean square at eight sets of slightly changed weights is" in " ".join(str(audit).split())


def test_only_outputs_of_few_floating_point_numbers_are_run_again() -> None:
    assert are_few([[torch.zeros(())]])
    assert are_few([[torch.zeros(8)], [torch.zeros(8)]])
    assert not are_few([[torch.zeros(17)]])
    assert not are_few([[torch.zeros(4, dtype=torch.int64)]])
    many = auditor.audit(nn.Linear(8, 8), torch.randn(4, 8), formats=["bf16"]).plans["cast_bf16"].verification
    assert many is not None
    assert many.scattered is None
