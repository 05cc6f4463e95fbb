"""What the first screen says of a format that the recommended plan does not use."""

from functools import cache

import torch
from torch import Tensor, nn

import auditor
from auditor.records import Audit
from auditor.reporters import text
from tests.support.subjects import seeded


class MaskedMean(nn.Module):
    """Divides by a number of valid entries, plus an epsilon that is zero in FP16: 0 * (4 / 0) is NaN."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.last = nn.Linear(8, 4)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        valid = mask.sum(-1, keepdim=True)
        ratio = 4 / (valid + 1e-8)
        return self.last(self.first(x) * (ratio * valid.clamp(max=1)))


@cache
def audited(formats: str) -> Audit:
    mask = torch.tensor([[1.0, 1.0, 1.0, 1.0], [0.0, 0.0, 0.0, 0.0]])
    inputs = (torch.linspace(-1, 1, 8).reshape(2, 4), mask)
    return auditor.audit(seeded(MaskedMean).eval(), inputs, device="cpu", formats=formats, strategies="cast")


def screen(formats: str) -> str:
    return " ".join(text(audited(formats)).split())


def test_a_format_that_overflows_comes_with_its_repair() -> None:
    audit = audited("fp16,bf16")
    assert audit.plan is not None
    assert audit.plan.format == "bf16"
    shown = screen("fp16,bf16")
    assert "avoided by the plan" in shown
    repair = shown.partition("To run in FP16 all the same, repair ")[2]
    assert "test_other_formats.py:24" in repair[:120]
    assert "In FP16, compute the divisor in FP32" in repair


def test_a_format_that_runs_needs_no_repair() -> None:
    assert "all the same, repair" not in screen("bf16")
