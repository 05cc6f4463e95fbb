"""Mixtures of experts that loop over their experts in Python: sizes depend on values, and some experts get nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.any_model.holding import held
from tests.support.replaying import Model, linear
from tests.support.subjects import normal

X = normal(12, 8)


def routed(m: Any, x: Tensor) -> Tensor:
    """The expert of each token: never the last one, which stays empty."""
    route: Tensor = m.gate(x)[:, :2].argmax(-1)
    return route


def written_by_index(m: Any, x: Tensor) -> Tensor:
    route, out = routed(m, x), torch.zeros_like(x)
    for index, expert in enumerate(m.experts):
        rows = torch.where(route == index)[0]
        out[rows] = expert(x[rows]).to(x.dtype)
    return out


def added_by_index(m: Any, x: Tensor) -> Tensor:
    weights, route = m.gate(x).softmax(-1).topk(2)
    out = torch.zeros_like(x)
    for index, expert in enumerate(m.experts):
        rows, which = torch.where(route == index)
        out.index_add_(0, rows, (expert(x[rows]) * weights[rows, which, None]).to(x.dtype))
    return out


def sorted_and_split(m: Any, x: Tensor) -> Tensor:
    route = routed(m, x)
    order = route.argsort(stable=True)
    sizes = torch.bincount(route, minlength=3).tolist()
    done = torch.cat([expert(rows) for expert, rows in zip(m.experts, x[order].split(sizes), strict=True)])
    out = torch.empty_like(done)
    out[order] = done
    return out


def token_by_token(m: Any, x: Tensor) -> Tensor:
    return torch.stack([m.experts[index](row) for index, row in zip(routed(m, x).tolist(), x, strict=True)])


SPELLINGS: list[Callable[[Any, Tensor], Tensor]] = [
    written_by_index,
    added_by_index,
    sorted_and_split,
    token_by_token,
]


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_experts_in_a_loop(spelling: Callable[[Any, Tensor], Tensor]) -> None:
    def build() -> Any:
        experts = nn.ModuleList([linear(8, 8, seed=seed) for seed in range(3)])
        return Model(spelling, gate=linear(8, 3, seed=9), experts=experts).eval(), ((X.clone(),), {})

    audit = held(build, formats=("fp16",))
    assert any("depends on values" in warning for warning in audit.warnings)
    # Autocast takes the gate and the experts low, however their results are put together.
    assert audit.plans["autocast_fp16"].low_precision_flops > 0.9


@pytest.mark.parametrize("grouped", [torch._grouped_mm, getattr(F, "grouped_mm", torch._grouped_mm)])
def test_grouped_products_are_products(grouped: Callable[..., Tensor]) -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        route = m.gate(x).argmax(-1)
        order = route.argsort()
        ends = torch.bincount(route, minlength=4).cumsum(0).to(torch.int32)
        done = grouped(x[order], m.weight, offs=ends)
        return torch.zeros_like(done).index_copy(0, order, done)

    def build() -> Any:
        weight = nn.Parameter(normal(4, 16, 16, seed=1) / 4)
        return Model(forward, gate=linear(16, 4), weight=weight).eval(), ((normal(16, 16),), {})

    audit = held(build, formats=("bf16",))
    (product,) = (report for report in audit.nodes if "grouped" in report.node.op)
    assert product.flops == 2 * 16 * 16 * 16  # every token meets one expert: 16 tokens, 16 in, 16 out
    # Autocast leaves it alone, whose list it is not on; a model stored low runs it low.
    assert audit.plans["cast_bf16"].low_precision_flops == 1
