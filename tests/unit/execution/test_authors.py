"""What the author runs low whatever the plan: regions of his own, and casts that he wrote."""

from __future__ import annotations

import torch
from torch import Tensor

from auditor.artefact.strategies import names
from auditor.execution.resolve import kept_low
from tests.support.capturing import Function
from tests.support.subjects import capture_of, normal


def region(x: Tensor, w: Tensor) -> Tensor:
    """A product in BF16, and one outside."""
    with torch.autocast("cuda", dtype=torch.bfloat16):
        y = x @ w
    return y.float() @ w


def written(x: Tensor, w: Tensor) -> Tensor:
    return x.bfloat16().relu().float() @ w


def found(function, format: str, *strategies: str) -> dict[str, str]:
    captured = capture_of(Function(function), normal(4, 4), normal(4, 4, seed=1))
    ops = {name: node.op.split(".")[1] for name, node in captured.nodes.items()}
    return {ops[name]: fmt for name, fmt in kept_low(captured, strategies or names(), format).items()}


def test_a_region_keeps_its_format_under_a_plan_in_another() -> None:
    assert found(region, "fp16") == {"matmul": "bf16", "to": "bf16"}
    assert found(region, "bf16") == {"matmul": "bf16", "to": "bf16"}


def test_so_does_a_cast_that_is_written() -> None:
    assert found(written, "fp16") == {"to": "bf16", "relu": "bf16"}


def test_where_nothing_is_low_nothing_is_kept() -> None:
    assert found(lambda x, w: x @ w, "fp16") == {}


def test_a_region_that_is_switched_off_keeps_nothing_low() -> None:
    def off(x: Tensor, w: Tensor) -> Tensor:
        with torch.autocast("cuda", enabled=False):
            return x @ w

    assert found(off, "fp16") == {}
