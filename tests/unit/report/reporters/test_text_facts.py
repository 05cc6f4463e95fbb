"""What the terminal says of an audit stands in its plan.json and measurements.json, number by number."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor, nn

import auditor
from auditor.records import Audit
from auditor.report.reporters import text
from auditor.report.words import memory, percent, plan_title, ratio


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
    return text.render(audit, width=100, color=False)


def test_rows_of_the_table_are_the_plans(audit: Audit, said: str) -> None:
    written = audit.to_json()
    for name, plan in audit.plans.items():
        (row,) = (line for line in said.splitlines() if plan_title(plan) in line and line.endswith("x"))
        held, without = written["plans"][name], written["baselines"][name]
        cells = re.split(r"\s{2,}", row.lstrip("* "))
        before = ratio(without["measured_error"]) if without["finite"] else cells[1]
        measured = [ratio(held["predicted_error"]), ratio(held["measured_error"])]
        assert cells == [plan_title(plan), before, *measured, f"{held['predicted_speedup']:.2f}x"]
        assert (cells[1] in ("fails to run", "not finite", "non-finite")) == (not without["finite"])
        assert row.startswith("*") == (name == written["recommended"])


def test_the_lines_below_it_are_of_the_recommended_plan(audit: Audit, said: str) -> None:
    plan = audit.to_json()["plans"][audit.recommended]
    assert f"* recommended; {percent(plan['low_precision_flops'])} of the FLOPs low" in said
    assert f"predicted for one {plan['target']}" in said
    chosen = audit.plans[str(audit.recommended)]
    assert chosen.memory is not None
    assert chosen.fp32_memory is not None
    assert f"predicted memory: {memory(chosen.memory)}; FP32: {memory(chosen.fp32_memory)}" in said


def test_verdicts_are_counted_over_all_operations(audit: Audit, said: str) -> None:
    nodes = audit.to_measurements()["nodes"]
    lines = " ".join(said.split())
    for fmt in ("fp16", "bf16"):
        verdicts = [node[fmt]["verdict"] for node in nodes if fmt in node]
        counts = verdicts.count("unsafe"), verdicts.count("sensitive")
        assert f"{fmt.upper()}: {counts[0]} unsafe and {counts[1]} sensitive of {len(nodes)} operations" in lines


def test_the_proof_has_the_error_and_the_budget(audit: Audit, said: str) -> None:
    written = audit.to_json()
    plan = written["plans"][written["recommended"]]
    lines = " ".join(said.split())
    assert f"error {ratio(plan['measured_error'])}, budget {ratio(written['budget']['max_error'])}" in lines.replace(
        "budget 0.01", f"budget {ratio(0.01)}"
    )
    assert plan["measured_error"] <= written["budget"]["max_error"]
    assert plan["verified_on"] in lines


def test_causes_are_counted_and_stand_where_they_are(audit: Audit, said: str) -> None:
    written = audit.to_json()
    heads = [line.split() for line in said.splitlines() if re.match(r"  [A-Z]{3}\d{3} ", line)]
    assert heads
    for code, severity, *_, source in heads:
        places = {(kind["rule"], kind["source"]) for kind in written["findings"] if kind["severity"] == severity}
        assert any(rule == code and str(line).endswith(source.rpartition("…")[2]) for rule, line in places)
        assert severity in ("error", "warning")
    assert f"python -m auditor explain {heads[0][0]}" in said
