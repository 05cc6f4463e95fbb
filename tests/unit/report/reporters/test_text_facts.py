"""What the terminal says of an audit stands in its plan.json and measurements.json, number by number."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import auditor
from auditor.plan.recommend import has_low
from auditor.records import Audit
from auditor.report.reporters import ADVICE_SHOWN, text
from auditor.report.words import percent, plan_title, ratio, sentence


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.inner(x) @ x.transpose(-1, -2)
        return self.norm(x + scores.masked_fill(scores > 1, -1e9).softmax(-1) @ x)


@pytest.fixture(scope="module")
def audit() -> Audit:
    torch.manual_seed(0)
    return auditor.audit(nn.Sequential(Block(), Block(), nn.Linear(8, 4)), torch.randn(2, 6, 8), device="cpu")


@pytest.fixture(scope="module")
def said(audit: Audit) -> str:
    return text(audit, width=100, color=False)


def test_rows_of_the_table_are_the_plans(audit: Audit, said: str) -> None:
    written = audit.to_dict()
    for name, plan in audit.plans.items():
        (row,) = (line for line in said.splitlines() if plan_title(plan) in line and line.endswith(("x", "0%")))
        if not has_low(plan):
            assert "all FP32" in row
            continue
        held, without = written["plans"][name], written["baselines"][name]
        cells = re.split(r"\s{2,}", row.lstrip("* "))
        before = ratio(without["measured_error"]) if without["finite"] else cells[1]
        measured = [ratio(held["predicted_error"]), ratio(held["measured_error"])]
        measured[1] += "" if plan.verified else ", over budget"
        assert [cell.strip() for cell in cells] == [
            plan_title(plan),
            before,
            *measured,
            percent(held["low_precision_flops"]),
            f"{held['predicted_speedup']:.2f}x",
        ]
        assert (cells[1] in ("fails to run", "not finite", "non-finite")) == (not without["finite"])
        assert row.startswith("*") == (name == written["recommended"])


def test_causes_are_counted_and_stand_where_they_are(audit: Audit, said: str) -> None:
    written = audit.to_dict()
    heads = [found for line in said.splitlines() if (found := re.match(r"(\S+):(\d+) ([A-Z]{3}\d{3}) ", line))]
    assert heads
    for file, number, code in (found.groups() for found in heads):
        places = {(kind["rule"], kind["source"]) for kind in written["findings"] if kind["severity"] != "info"}
        assert any(rule == code and str(line).endswith(f"{Path(file).name}:{number}") for rule, line in places)
    assert f"python -m auditor explain {heads[0][3]}" in said


def test_lines_of_training_are_its_record() -> None:
    torch.manual_seed(0)
    model, batch = nn.Linear(8, 8), (torch.randn(8, 8), torch.randn(8, 8))
    found = auditor.audit(model, batch, mode="training", loss_fn=nn.functional.mse_loss, strategies=("autocast",))
    assert found.training is not None
    said = text(found, width=200, color=False)
    assert f"Training  {sentence(found.training.recommendation)}" in re.sub(r"Training\s+", "Training  ", said)
    shown = [line.split("- ", 1)[1] for line in said.splitlines() if re.match(r"\s+- ", line)]
    titles = list(dict.fromkeys(advice.title for advice in found.training.advice))
    assert shown == titles[:ADVICE_SHOWN]
    twice = replace(found, training=replace(found.training, advice=2 * found.training.advice))
    assert text(twice, width=200, color=False) == said
    assert found.to_dict()["training"]["recommendation"] == found.training.recommendation
