"""FP8 in the model itself: weights and buffers that forward turns into numbers, and values cast to FP8 on the way."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import auditor
from tests.any_model.holding import held, raised
from tests.any_model.test_stored_low import Runs, mlp, normal, one, seeded

E4M3, E5M2, BF16 = torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16


def coded(*blocks: int) -> dict[str, Tensor]:
    """A weight of 16 by 16 in FP8, with a scale for each block of rows."""
    weight = torch.randn(*blocks, 16 // max(1, *blocks), 16) if blocks else torch.randn(1, 16, 16)
    scale = weight.abs().amax((1, 2), keepdim=True) / 448
    return {"code": (weight / scale).to(E4M3), "scale": scale}


def decoded(m: Any, dtype: torch.dtype) -> Tensor:
    weight: Tensor = m.code.to(dtype) * m.scale.to(dtype)
    return weight.reshape(16, 16)


def linear(m: Any, x: Tensor) -> Any:
    return m.body(F.linear(x, decoded(m, x.dtype)))


def as_parameter(parts: dict[str, Tensor]) -> dict[str, Tensor]:
    return {**parts, "code": nn.Parameter(parts["code"], requires_grad=False)}


def activations(dtype: torch.dtype) -> Any:
    """Scaled to what FP8 holds, cast, and scaled back: quantisation as it is simulated."""

    def forward(m: Any, x: Tensor) -> Any:
        y = m.first(x)
        scale = y.abs().amax() / torch.finfo(dtype).max
        return m.body((y / scale).to(dtype).to(y.dtype) * scale)

    return forward


CASES = {
    "a buffer": lambda: (Runs(linear, body=mlp(), **coded()), one(normal(4, 16))),
    "a parameter": lambda: (Runs(linear, body=mlp(), **as_parameter(coded())), one(normal(4, 16))),
    "a scale for each block": lambda: (Runs(linear, body=mlp(), **coded(4)), one(normal(4, 16))),
    "turned into BF16": lambda: (
        Runs(lambda m, x: m.body(F.linear(x.bfloat16(), decoded(m, BF16)).float()), body=mlp(), **coded()),
        one(normal(4, 16)),
    ),
    "activations in E4M3": lambda: (Runs(activations(E4M3), first=nn.Linear(16, 16), body=mlp()), one(normal(4, 16))),
    "activations in E5M2": lambda: (Runs(activations(E5M2), first=nn.Linear(16, 16), body=mlp()), one(normal(4, 16))),
}


@pytest.mark.parametrize("kind", CASES)
def test_fp8_values_stay_what_the_author_made_them(kind: str) -> None:
    build = seeded(CASES[kind])
    audit = held(build)
    assert audit.plans["autocast_fp16"].verified
    assert audit.plans["autocast_fp16"].low_precision_flops >= 0.5
    for name in audit.plans:
        model: Any = auditor.apply(build()[0], audit, name)
        if hasattr(model, "code"):
            assert model.code.dtype is E4M3
            assert torch.equal(model.code.float(), build()[0].code.float())  # type: ignore[operator,union-attr]


def test_fp8_in_a_model_stored_in_bf16() -> None:
    """The scales and the layers are raised, the codes are not."""
    build = seeded(lambda: (Runs(linear, body=mlp().bfloat16(), **coded()), one(normal(4, 16, dtype=BF16))))
    audit = held(build, reference=raised(build))
    assert all(plan.verified and plan.raised == "weights" for plan in audit.plans.values())
