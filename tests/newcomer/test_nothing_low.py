"""Plans that run nothing low do not claim an error of 0: every reporter says what the smallest reachable error is."""

import re

import pytest
import torch
from torch import nn

import auditor
from auditor.report.reporters import html, markdown, text

BUDGET = 1e-5


@pytest.fixture(scope="module")
def audit():
    torch.manual_seed(0)
    layers = (nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(0))
    return auditor.audit(nn.Sequential(*layers).eval(), x, formats=("fp16",), max_error=BUDGET)


@pytest.fixture(scope="module")
def reach(audit):
    return min(plan.reach for plan in audit.plans.values())


def test_the_smallest_error_is_over_the_budget_and_below_that_of_everything_low(audit, reach):
    assert audit.recommended is None
    everything = min(base.measured_error for base in audit.baselines.values())
    assert BUDGET < reach < everything


def test_reports_say_so_and_claim_no_error_of_zero(audit, reach):
    page = re.sub(r"\s+", " ", html(audit))
    said = f"the smallest reachable error is {reach:.2g}, in FP16"
    assert all(said in re.sub(r"\s+", " ", shown) for shown in (text(audit, width=100), markdown(audit), page))
    rows = [line for line in text(audit, width=100, color=False).splitlines() if "FP16 " in line and "all FP32" in line]
    assert len(rows) == len(audit.plans)
    assert not [row for row in rows if re.search(r" 0 |1\.00x", row)]
    assert page.count("Smallest reachable error") == len(audit.plans)
    assert "Measured error" not in page
    assert "1.00×" not in page
