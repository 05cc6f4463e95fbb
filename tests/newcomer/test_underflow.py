"""What vanishes in FP16 is called underflow, and its reader is sent to BF16, which has the range."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import auditor
from auditor.records.audit import Audit
from auditor.report.view import ReportView
from tests.support.replaying import Model


def logarithm_of(y: Tensor) -> Tensor:
    return (y + 1e-8).log()


def quotient_of(y: Tensor) -> Tensor:
    return y / (y.norm(dim=-1, keepdim=True) + 1e-8)  # 0 / 0 is NaN


def audited(ended: Callable[[Tensor], Tensor], formats: str = "fp16") -> Audit:
    """Of a hidden layer one row of which is zero, so that only an eps keeps what follows finite."""

    def forward(m: Any, x: Tensor) -> Tensor:
        kept = (torch.arange(x.shape[0]) > 0).to(x.dtype)[:, None]
        return m.last(ended(m.first(x).relu() * kept))

    torch.manual_seed(0)
    model, x = Model(forward, first=nn.Linear(8, 8), last=nn.Linear(8, 4)), torch.randn(6, 8)
    return auditor.audit(model, (x,), formats=formats, progress=False)


def flagged(found: Audit, fmt: str = "fp16") -> dict[str, tuple[str | None, str | None]]:
    """{operation: (its cause, what limits it)}, of those that are not safe."""
    return {
        r.node.op.split(".")[1]: (r.errors[fmt].cause, r.verdicts[fmt].limited_by)
        for r in found.nodes
        if r.verdicts[fmt].verdict != "safe"
    }


@pytest.fixture(scope="module")
def logarithm() -> Audit:
    return audited(logarithm_of, "fp16,bf16")


def test_an_eps_that_vanishes_under_a_logarithm(logarithm: Audit) -> None:
    assert flagged(logarithm) == {"add": ("underflow", "range"), "log": ("underflow", "range")}
    reasons = {r.node.op.split(".")[1]: r.verdicts["fp16"].reason for r in logarithm.nodes}
    assert reasons["log"] == "underflow: an input that is not zero in FP32 is zero in FP16; the outputs turn Inf or NaN"
    assert reasons["add"].startswith("underflow: ")


def test_the_reader_is_sent_to_bf16(logarithm: Audit) -> None:
    fp16, bf16 = (tally.sentence for tally in ReportView(logarithm).tallies)
    assert fp16.endswith("causes: underflow (BF16 has FP32's range).")
    assert "underflow" not in bf16
    assert "overflow" not in " ".join((fp16, bf16))
    (eps,) = [finding for finding in logarithm.findings if finding.rule == "CON002"]
    assert eps.advice.startswith("Run the model in BF16")
    assert not any("overflow" in r.verdicts["fp16"].reason for r in logarithm.nodes)


def test_an_eps_that_vanishes_under_a_quotient() -> None:
    assert flagged(audited(quotient_of)) == dict.fromkeys(("add", "div"), ("underflow", "range"))
