"""What is handed out and the errors that are stated: a plan wherever one holds, as it errs by hand."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.any_model.holding import drawn, held
from tests.support.replaying import Model, linear
from tests.support.subjects import normal

X = normal(64, 16)


def blend(m: Any, x: Tensor) -> Tensor:
    """A lone output of a large elementwise part: as much is cast as autocast saves, or more."""
    for _ in range(4):
        x = 1.1 * torch.sin(x)
    return x + m.out(x)


@pytest.mark.parametrize("module", [nn.Softmax(-1), nn.LayerNorm(16), nn.GELU()], ids=["softmax", "norm", "gelu"])
def test_a_model_without_products_is_stored_low(module: nn.Module) -> None:
    audit = held(lambda: (copy.deepcopy(module).eval(), ((X.clone(),), {})))
    assert audit.recommended == "cast_fp16"
    assert "(`cast_fp16`), 2.00x" in audit.recommendation


def test_a_plan_that_holds_is_handed_out_where_it_saves_no_time() -> None:
    audit = held(lambda: (Model(blend, out=linear(16, 1)).eval(), ((X.clone(),), {})), strategies=("autocast",))
    assert audit.plans["autocast_bf16"].low_precision_flops == 1
    assert audit.recommended in ("autocast_fp16", "autocast_bf16")


def test_what_holds_without_a_plan_is_handed_out_where_the_curve_has_nothing() -> None:
    """One layer is low or FP32, and low takes up nearly all of the budget, where plans leave some room."""
    plain = held(lambda: (linear(16, 16), ((X.clone(),), {}))).baselines["autocast_bf16"].measured_error
    audit = held(lambda: (linear(16, 16), ((X.clone(),), {})), max_error=1.1 * plain, formats=("bf16",))
    plan = audit.plans["autocast_bf16"]
    assert (plan.is_verified, plan.low_precision_flops, plan.measured_error) == (True, 1.0, pytest.approx(plain))
    assert "no plan with low precision" not in audit.recommendation


def differences(m: Model, x: Tensor) -> Tensor:
    h = m.first(x)
    return (h[:, None] - h[None]).square().sum(-1).neg().softmax(-1) @ h


def test_two_views_of_one_value_are_rounded_together() -> None:
    """A value differs from itself by nothing, rounded once, and by its rounding, if one view of it alone were
    rounded."""
    audit = held(lambda: (Model(differences, first=linear(16, 16)).eval(), ((1e3 * X[:8],), {})), max_error=0.02)
    assert audit.plans["cast_bf16"].low_precision_flops == 1
    assert "unsafe" not in {report.verdicts["bf16"].verdict for report in audit.nodes}


# Errors are stated as they are by hand: per gradient mode, since kernels differ, and no finer than FP32 repeats itself.


def projected(ends: Callable[[Tensor], Tensor]) -> nn.Module:
    """A projection, and what a function makes of it."""
    return Model(lambda m, x: m.ends(m.projection(x)), projection=nn.Linear(16, 16), ends=ends)


@pytest.mark.parametrize(
    "ends",
    [
        torch.linalg.svdvals,
        lambda h: torch.linalg.eigvalsh(h.T @ h + torch.eye(16)),
        lambda h: torch.linalg.matrix_norm(h, "nuc"),
        torch.linalg.cond,
    ],
    ids=["svdvals", "eigvalsh", "nuclear", "cond"],
)
def test_kernels_that_differ_with_gradients_have_an_error_each(ends: Callable[[Tensor], Tensor]) -> None:
    audit = held(drawn(lambda: projected(ends), 8, 16))
    for plan in audit.plans.values():
        assert plan.verification.with_gradients != plan.measured_error
        assert plan.verification.with_gradients == pytest.approx(plan.measured_error, rel=0.05)


def test_what_rounds_as_its_memory_lies_states_how_far_fp32_is_from_itself() -> None:
    held(drawn(lambda: projected(lambda h: torch.linalg.lstsq(h.T, h.T[:, :3] + 1).solution), 8, 16), in_fp32=1e-6)
