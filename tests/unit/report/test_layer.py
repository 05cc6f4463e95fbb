"""What `--explain-layer` says: of a fresh audit, and of its files the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import auditor
from auditor.cli.program import main
from auditor.errors import AuditorError
from auditor.records.audit import Audit
from auditor.report.kept import explain_layer
from tests.support.subjects import normal, seeded


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return 400 * self.inner(x) * torch.rsqrt((x * 400).pow(2).mean(-1, keepdim=True))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(16, 16), Norm(), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x * 10))).softmax(-1)


@pytest.fixture(scope="module")
def audit() -> Audit:
    return auditor.audit(seeded(Net), normal(4, 16), formats=("fp16",), device="cpu")


def test_a_module_that_stays_fp32_says_why_under_each_plan(audit: Audit) -> None:
    text = explain_layer(audit, "norm")
    for name, plan in audit.plans.items():
        words = ["FP32: " + reason.words for reason in plan.reasons if "norm" in reason.modules] or ["FP16"]
        mark = " (recommended)" if name == audit.recommended else ""
        assert [f"  {name}{mark}: {clause}" for clause in words] == [
            line for line in text.splitlines() if line.startswith(f"  {name}")
        ]
    assert "FP32: pow_1 is unsafe: overflow: " in text
    assert text.splitlines()[1].startswith(f"  {audit.recommended} (recommended)")


def test_an_operation_says_why_too(audit: Audit) -> None:
    (softmax,) = (r.node.name for r in audit.nodes if "softmax" in r.node.op)
    text = explain_layer(audit, softmax)
    assert "  autocast_fp16: not low: autocast runs softmax in FP32 by itself" in text.replace(" (recommended)", "")
    inside = next(r.node.name for r in audit.nodes if r.node.owner == "norm")
    assert "FP32 with norm: " in explain_layer(audit, inside)


def test_a_name_that_there_is_not(audit: Audit) -> None:
    with pytest.raises(AuditorError, match=r"did you mean norm\?") as caught:
        explain_layer(audit, "nrm")
    assert caught.value.slug == "no-such-layer"


@pytest.mark.parametrize("given", ["", "plan.json"])
def test_the_files_of_an_audit_say_the_same(
    audit: Audit, given: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    audit.save(tmp_path)
    assert main(["explain-layer", str(tmp_path / given), "norm"]) == 0
    assert capsys.readouterr().out.strip() == explain_layer(audit, "norm").strip()
    assert main(["explain-layer", str(tmp_path / given), "nrm"]) == 2
