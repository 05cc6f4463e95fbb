"""A dtype handed to a module as an argument is its caller's to say: plans know what is then computed in."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from auditor.execution.policy import Policy, scoped
from auditor.records import ScopeChoice
from tests.any_model.holding import Call, held
from tests.support.replaying import replayed
from tests.support.subjects import normal, only


class Embedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, t: Tensor, dtype: torch.dtype) -> Tensor:
        return self.last(nn.functional.silu(self.first(t.to(dtype))))


class Handing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = Embedding()

    def forward(self, t: Tensor, hidden_dtype: torch.dtype | None = None) -> Tensor:
        return self.embedding(t, hidden_dtype)


class Conditioned(nn.Module):
    """As diffusion models do it: the embedding of the time is computed in what the model is in. Its root is sensitive."""

    def __init__(self, keyword: bool) -> None:
        super().__init__()
        self.before, self.time, self.after = nn.Linear(64, 64), Handing(), nn.Linear(64, 64)
        self.keyword = keyword

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        h = self.before(x)
        wave = torch.cos(x[:, :1] * 300.0)
        t = torch.cos(t[:, None] * torch.arange(64) / 64)
        e = self.time(t, hidden_dtype=h.dtype) if self.keyword else self.time(t, h.dtype)
        return self.after(h) * wave + e


@pytest.mark.parametrize("keyword", [True, False])
def test_low_layers_beside_a_root_in_fp32(keyword: bool) -> None:
    def build() -> tuple[nn.Module, Call]:
        torch.manual_seed(0)
        return Conditioned(keyword).eval(), ((torch.randn(16, 64), torch.rand(16) * 10), {})

    audit = held(build, formats=("bf16",), strategies=("cast",))
    plan = audit.plans["cast_bf16"]
    assert plan.scopes[""].precision == "fp32"
    assert plan.verified
    assert plan.low_precision_flops == 0.5  # two layers of four: those of the embedding are handed the root's FP32


def test_the_callers_scope_says_what_is_cast_to() -> None:
    capture = replayed(Conditioned(keyword=True), normal(2, 64), normal(2))
    cast = only(capture, "to")
    assert [call.handed for call in cast.calls] == [False, True, True]
    for root, inner, written in (("fp32", "bf16", {}), ("bf16", "fp32", {1: torch.bfloat16})):
        scopes = {"": ScopeChoice(root), "time": ScopeChoice(inner)}
        how = Policy(capture, "cast", scoped(scopes), "bf16")
        assert how.casts(cast).literals.arguments == written
