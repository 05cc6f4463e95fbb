"""Optimizers that compute gradients by a closure: LBFGS, which calls it several times in a step, and SAM after its first half."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import auditor
from auditor.features.rehearsal.rehearse import rehearse_as_written
from auditor.isolation.process import ieee
from tests.features.rehearsal.cases import classes, mlp

Made = Callable[..., Any]
STEPS = 3


class SAM(torch.optim.Optimizer):
    """Sharpness-aware minimization: moves the weights uphill, calls the closure there, and steps from the old weights."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})
        self.base = torch.optim.SGD(self.param_groups, lr)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        parameters = self.param_groups[0]["params"]
        norm = torch.stack([p.grad.norm() for p in parameters]).norm()
        moves = [0.05 * p.grad / norm for p in parameters]
        torch._foreach_add_(parameters, moves)
        self.zero_grad()
        with torch.enable_grad():
            closure()
        torch._foreach_sub_(parameters, moves)
        self.base.step()


def with_sam(dtype: torch.dtype | None = None) -> Made:
    model = mlp(16, 8, 4)
    optimizer = SAM(model.parameters(), 0.1)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        def closure() -> torch.Tensor:
            with torch.autocast("cuda", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
                loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss

        optimizer.zero_grad()
        loss = closure()
        optimizer.step(closure)
        return loss.detach()

    return step


class SameDtype(nn.Module):
    """Raises if its layer gives other dtypes in later calls than in the first."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp(16, 8, 4)
        self.dtype: torch.dtype | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers(x)
        self.dtype = self.dtype or out.dtype
        if out.dtype is not self.dtype:
            raise ValueError(f"first {self.dtype}, then {out.dtype}")
        return out


def with_lbfgs(model: nn.Module | None = None) -> Made:
    model = SameDtype() if model is None else model
    optimizer = torch.optim.LBFGS(model.parameters(), 0.3, max_iter=3, line_search_fn="strong_wolfe")

    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss

        return optimizer.step(closure)

    return step


@pytest.mark.parametrize("make", [with_sam, with_lbfgs])
def test_a_closure_is_called_as_often_and_as_late_as_the_optimizer_calls_it(make: Made) -> None:
    batches = classes(2)
    run = rehearse_as_written(make(), batches, STEPS, 0, "step")["fp32"]
    torch.manual_seed(0)
    by_hand = make()
    with ieee():
        losses = [by_hand(*batches[i % 2]).item() for i in range(STEPS)]
    assert run.losses == pytest.approx(losses, rel=1e-5)
    assert losses[2] < losses[0]


def test_lbfgs_is_rehearsed_without_a_loss_scale() -> None:
    found = auditor.rehearse(with_lbfgs(), classes(2), STEPS, remedies=False)
    fp16 = found.runs["fp16_autocast"]
    assert "LBFGS (test_closures.py:" in str(fp16.failure)
    assert "computes gradients inside `step`, by a closure, which a GradScaler does not support: train in" in str(
        fp16.failure
    )
    others = [run for name, run in found.runs.items() if name != "fp16_autocast"]
    assert [(run.failure, len(run.losses)) for run in others] == [(None, STEPS)] * 3
    assert 1e-5 < (found.runs["bf16_autocast"].errors[0] or 0.0) < 0.1
    assert found.recommended in ("bf16_autocast", "fp32")  # by three losses of line searches, which part early


def test_fp16_without_a_scaler_and_with_a_closure_is_told_to_use_bf16() -> None:
    step = with_sam(torch.float16)
    run = rehearse_as_written(step, classes(2), STEPS, 0, "step")["as_written"]
    assert {each.kind for each in run.findings} == {"no-scaler"}
    assert "since a GradScaler supports no closure" in run.findings[0].text
