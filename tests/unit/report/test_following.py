"""The line that says what to do next: for every outcome one, and doing it does what it says."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import auditor
from auditor.records import Audit
from auditor.report.view import following
from tests.unit.report.factory import make_audit

HERE = Path("audits/net")


class Net(nn.Module):
    def __init__(self, large: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.large = nn.Linear(8, 8), nn.Linear(8, 4), large

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last((self.first(x) * self.large).tanh())
        return y


def audited(**how: Any) -> Audit:
    options = {"formats": "bf16", "strategies": "cast", "device": "cpu", **how}
    return auditor.audit(Net(), torch.randn(16, 8, generator=torch.Generator().manual_seed(1)), **options)


def test_a_budget_that_is_named_is_enough() -> None:
    tight = audited(max_error=1e-5)
    assert tight.recommended is None
    said = following(replace(tight, findings=()), HERE)
    budget = re.search(r"--max-error (\S+):", said)
    assert budget is not None, said
    found = audited(max_error=float(budget[1]))
    assert found.recommended is not None
    assert found.plans[found.recommended].measured_error <= float(budget[1])


def test_a_cause_that_is_named_is_the_first_and_can_be_explained(capsys: pytest.CaptureFixture[str]) -> None:
    audit = make_audit(60, recommended=None)
    said = following(audit, HERE)
    code = re.match(r"repair (\w+) at \S+, and audit again; `python -m auditor explain (\w+)`", said)
    assert code is not None, said
    assert code[1] == code[2] in {finding.rule for finding in audit.findings if finding.severity != "info"}


def test_random_weights_come_first_where_a_checkpoint_would_load() -> None:
    audit = make_audit(20)
    random = replace(audit, subject=replace(audit.subject, random_weights=True))
    assert "--weights FILE" in following(random, HERE)
    assert "--weights" not in following(replace(random, parameters=0), HERE)
    assert "--weights" not in following(audit, HERE)


def test_training_that_can_be_low_has_a_loop_in_the_report() -> None:
    data = [(torch.randn(8, 8), torch.randn(8, 4)) for _ in range(2)]
    found = auditor.audit(
        Net(), data, mode="training", loss_fn=nn.MSELoss(), formats="bf16", strategies="autocast", device="cpu"
    )
    assert found.training.format == "bf16"
    assert following(found, HERE) == "train with the loop in audits/net/report.html, section Training."
    from auditor.report.reporters import REPORTERS

    assert "train_step(model, scaler" in REPORTERS["html"](found)
