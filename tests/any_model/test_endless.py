"""A loop that waits for two numbers to agree may never end in half: that costs the plan, not the audit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import auditor
from auditor.imitation import imitated


class FixedPoint(nn.Module):
    """x -> z with z = tanh(Wz + x), iterated until FP32 cannot tell it from its successor."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(8, 8)
        nn.init.orthogonal_(self.lin.weight, gain=0.5)

    def forward(self, x: Tensor) -> Tensor:
        z = torch.zeros_like(x)
        while True:
            after = torch.tanh(self.lin(z) + x)
            if (after - z).norm() < 1e-6 and after.dtype is torch.float32:  # in BF16 it may go to and fro for ever
                return after
            z = after


def test_the_audit_ends() -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model, x = FixedPoint(), torch.randn(2, 8)
        found = auditor.audit(model, x, formats=("bf16",), strategies=("cast",), device="cpu")
    assert "a loop does not end in this format" in str(found.baselines["cast_bf16"].failure)
    plan = found.plans["cast_bf16"]
    assert plan.scopes[""].precision != "bf16" or not plan.verified


def counted(steps: int) -> list[float]:
    x = torch.ones(2)
    with imitated("cuda", most=3):
        for _ in range(steps):
            x = x + 1
    return x.tolist()


def test_an_imitated_run_ends_after_as_many_operations_as_it_may_take() -> None:
    assert counted(3) == [4.0, 4.0]
    with pytest.raises(RuntimeError, match="ended after 3 operations"):
        counted(4)


class Adaptive(nn.Module):
    """Shrinks its step until it is below what the dtype can tell apart; only FP32 ever gets there."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        step = x * torch.finfo(x.dtype).eps * 2**10
        while bool(step.abs().amax() > torch.finfo(torch.float32).eps):
            step = step / 4 if step.dtype is torch.float32 else step * 0.999
            x = x + torch.tanh(self.lin(x)) * step
        return x


def test_a_recording_in_half_ends_too() -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        found = auditor.audit(Adaptive(), torch.randn(2, 8), formats=("bf16",), strategies=("cast",), device="cpu")
    assert "a loop does not end in this format" in str(found.baselines["cast_bf16"].failure)
    assert found.plans["cast_bf16"].verified
