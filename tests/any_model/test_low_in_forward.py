"""Half precision that forward asks for itself, and half inputs of FP32 models: the reference has them as the author wrote them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.any_model.holding import held
from tests.any_model.test_stored_low import Runs, mlp, normal, one, seeded

BF16, FP16 = torch.bfloat16, torch.float16


def scores(m: Any, x: Tensor) -> Any:
    return m.last(torch.matmul(m.first(x).half(), m.key(x).half().mT).float().softmax(-1))


def two_layers() -> dict[str, nn.Module]:
    return {"first": nn.Linear(16, 16), "last": nn.Linear(16, 8)}


def cast_weights(m: Any, x: Tensor) -> Tensor:
    return F.linear(x.bfloat16(), m.first.weight.bfloat16(), m.first.bias.bfloat16()).float()


def accumulated(m: Any, x: Tensor) -> Any:
    """Summed in a buffer that is made in BF16."""
    total = torch.zeros(4, 16, dtype=BF16)
    for _ in range(3):
        total += m.first(x).to(total.dtype)
    return m.last(total.float())


CASES = {
    "a product in FP16": lambda: (Runs(scores, first=nn.Linear(16, 16), key=nn.Linear(16, 16), last=nn.Linear(4, 8)), one(normal(4, 16))),
    "a value in BF16": lambda: (Runs(lambda m, x: m.last(m.first(x).bfloat16().float()), **two_layers()), one(normal(4, 16))),
    "weights cast to BF16": lambda: (Runs(cast_weights, first=nn.Linear(16, 16)), one(normal(4, 16))),
    "a softmax in FP16": lambda: (Runs(lambda m, x: m.last(m.first(x).half().softmax(-1).float()), **two_layers()), one(normal(4, 16))),
    "a sum in BF16": lambda: (Runs(accumulated, **two_layers()), one(normal(4, 16))),
    "a result in FP16": lambda: (Runs(lambda m, x: m.body(x).half(), body=mlp()), one(normal(4, 16))),
    "results in both": lambda: (Runs(lambda m, x: (m.body(x).bfloat16(), m.body(x)), body=mlp()), one(normal(4, 16))),
    "an input that it raises": lambda: (Runs(lambda m, x: m.body(x.float()), body=mlp()), one(normal(4, 16, dtype=FP16))),
    "an input that it promotes": lambda: (
        Runs(lambda m, x: m.body(x * m.gain), body=mlp(), gain=nn.Parameter(torch.ones(16))),
        one(normal(4, 16, dtype=FP16)),
    ),
    "inputs in containers": lambda: (
        Runs(lambda m, batch, mask: m.body(batch["x"][0].to(m.body[0].weight.dtype) + mask.float()), body=mlp()),
        (({"x": [normal(4, 16, dtype=BF16)]},), {"mask": normal(16, dtype=FP16)}),
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", CASES)
def test_what_the_author_computes_in_half_is_part_of_the_reference(kind: str) -> None:
    audit = held(seeded(CASES[kind]))
    assert {plan.raised for plan in audit.plans.values()} == {"none"}
    assert not audit.live.warnings
    assert all(plan.verified for plan in audit.plans.values())
    assert audit.plans["autocast_fp16"].low_precision_flops > 0.5


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_region_of_the_authors_own_is_judged_as_what_it_is(device: str) -> None:
    """A product of 1e6 in a BF16 region: FP16 would overflow, but never gets there."""

    def forward(m: Any, x: Tensor) -> Any:
        with torch.autocast(device, dtype=BF16):
            y = m.first(x * 1e6)
        return m.last(y.float() / 1e6)

    audit = held(seeded(lambda: (Runs(forward, **two_layers()), one(normal(4, 16)))), strategies=("autocast",))
    product = next(report for report in audit.nodes if report.node.owner == "first")
    verdict = product.verdicts["fp16"]
    assert (verdict.verdict, verdict.reason) == ("safe", "the author runs it in BF16, whatever the plan")
    plan = audit.plans["autocast_fp16"]
    assert plan.verified
    assert plan.predicted_error < 0.01
    assert plan.low_precision_flops == 1.0


class RaisedWhereHalf(nn.Module):
    """Its norm is computed in FP32 where the convolution before it answered in half; in FP32 there is no such cast."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv1d(4, 8, 3), nn.Conv1d(8, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        normal = nn.functional.normalize(y.float() if y.dtype != torch.float32 else y, dim=1).to(y.dtype)
        return self.last(normal)


def test_a_layer_whose_result_is_raised_counts_as_low() -> None:
    audit = held(seeded(lambda: (RaisedWhereHalf(), one(normal(2, 4, 16)))))
    convolutions = {report.node.name for report in audit.nodes if "conv" in report.node.op}
    low = [plan for plan in audit.plans.values() if all(choice.precision != "fp32" for choice in plan.scopes.values())]
    assert low
    assert len(convolutions) == 2
    for plan in low:
        assert plan.low_precision_flops == 1.0, plan.name
        assert not convolutions & {name for reason in plan.reasons for name in reason.operations}
