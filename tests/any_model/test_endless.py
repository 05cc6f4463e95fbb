"""A loop that waits for two numbers to agree may never end in half: that costs the plan, not the audit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import auditor
from auditor.capture.emulation import emulate
from tests.any_model.holding import held


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
    assert "a loop goes on for longer in this format, or for ever" in str(found.baselines["cast_bf16"].failure)
    plan = found.plans["cast_bf16"]
    assert plan.scopes[""].precision != "bf16" or not plan.verified


def counted(steps: int) -> list[float]:
    x = torch.ones(2)
    with emulate("cuda", most=3):
        for _ in range(steps):
            x = x + 1
    return x.tolist()


def test_an_emulated_run_ends_after_as_many_operations_as_it_may_take() -> None:
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
    assert "a loop goes on for longer in this format, or for ever" in str(found.baselines["cast_bf16"].failure)
    assert found.plans["cast_bf16"].verified


class Suppressed(nn.Module):
    """Boxes by greedy suppression in Python: the loop takes most of the operations, and no output is made of them."""

    def __init__(self) -> None:
        super().__init__()
        self.score, self.box = nn.Linear(8, 1), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        scores, boxes = self.score(x)[:, 0], self.box(x).cumsum(0)
        kept, order = [], scores.argsort(descending=True)
        while order.numel():
            first, others = order[0], order[1:]
            kept.append(first.item())
            near = (boxes[others] - boxes[first]).square().sum(-1).sqrt() < 1e-6
            order = others[near.logical_not()]
        return scores[torch.tensor(kept)].sum() + boxes.mean(0)


def build(rows: int) -> tuple[nn.Module, tuple[tuple[Tensor], dict[str, Any]]]:
    torch.manual_seed(0)
    return Suppressed(), ((torch.randn(rows, 8),), {})


def test_a_loop_that_leaves_nothing_in_the_recording_ends_when_it_ends() -> None:
    audit = held(lambda: build(180), formats=("fp16",), strategies=("autocast",))
    assert audit.plans["autocast_fp16"].verified
    assert audit.plans["autocast_fp16"].low_precision_flops == 1.0
    assert len(audit.nodes) < 100


def test_as_many_operations_as_the_inputs_take_that_a_plan_is_verified_on() -> None:
    model, (few, _) = build(4)
    many = build(180)[1][0]
    audit = auditor.audit(model, [few, many], formats=("fp16",), strategies=("autocast",), device="cpu")
    assert audit.baselines["autocast_fp16"].failure is None
    assert audit.plans["autocast_fp16"].verified
