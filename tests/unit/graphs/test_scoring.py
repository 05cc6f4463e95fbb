"""Programs and the user's own score: what a run of the file by hand gives, in the process of its own and in this one."""

from __future__ import annotations

import io
import statistics
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

import auditor
from auditor.records import Audit

INPUTS = torch.linspace(-2, 2, 64 * 8).reshape(64, 8).sin()


@dataclass
class Answer:
    logits: Tensor
    hidden: Tensor


class Classed(nn.Module):
    """Returns a class of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Answer:
        hidden = torch.nn.functional.gelu(self.wide(x))
        return Answer(self.narrow(hidden), hidden)

    @classmethod
    def made(cls) -> nn.Module:
        torch.manual_seed(3)
        return cls().eval()


def near(net: nn.Module) -> Iterator[Tensor]:
    """Which samples are answered to within a thousandth of their size."""
    net.eval()
    assert next(net.parameters()).device.type == "cpu"
    with torch.no_grad():
        expected = Classed.made()(INPUTS).logits
    for x, y in zip(INPUTS.split(16), expected.split(16), strict=True):
        yield (net(x).logits.float() - y).norm(dim=1) <= 1e-3 * y.norm(dim=1)


def by_hand(audit: Audit, name: str) -> float:
    program = torch.export.load(io.BytesIO(audit.programs[f"{name}.pt2"])).module()
    expected = Classed.made()(INPUTS).logits
    with auditor.emulate("cuda"), torch.no_grad():
        return statistics.fmean(
            float(x)
            for i in range(4)
            for x in _within(program(INPUTS[16 * i :][:16])["logits"], expected[16 * i :][:16])
        )


def _within(found: Tensor, y: Tensor) -> Tensor:
    return (found.float() - y).norm(dim=1) <= 1e-3 * y.norm(dim=1)


@pytest.fixture(scope="module")
def audit() -> Audit:
    return auditor.audit(
        Classed.made(), INPUTS[:8], strategies=("autocast", "graph"), evaluate=near, max_drop=0.05, device="cpu"
    )


def test_the_score_is_what_a_run_by_hand_gives(audit: Audit) -> None:
    for name in ("graph_fp16", "graph_bf16"):
        plan = audit.plans[name]
        assert plan.verified
        assert plan.score.failure is None
        assert plan.score.value == by_hand(audit, name)
    assert audit.plans["graph_fp16"].score.passed
    assert not audit.plans["graph_bf16"].score.passed
    assert not audit.plans["graph_bf16"].holds
