"""What the terminal says of an audit stands in its plan.json and measurements.json, number by number."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import auditor
from auditor.records import Audit, Reason, ScopeChoice
from auditor.report.kept import islands
from auditor.report.overview import ADVICE_SHOWN, ISLANDS_SHOWN
from auditor.report.reporters import text
from auditor.report.words import label, memory, percent, plan_title, ratio, sentence


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


def test_the_lines_below_it_are_of_the_recommended_plan(audit: Audit, said: str) -> None:
    plan = audit.to_json()["plans"][audit.recommended]
    said = " ".join(said.split())
    assert f"* recommended; {percent(plan['low_precision_flops'])} of the FLOPs low" in said
    assert f"predicted for one {plan['target']}" in said
    chosen = audit.plans[str(audit.recommended)]
    assert chosen.memory is not None
    assert chosen.fp32_memory is not None
    assert f"predicted memory: {memory(chosen.memory)}; FP32: {memory(chosen.fp32_memory)}" in said


def test_causes_are_counted_and_stand_where_they_are(audit: Audit, said: str) -> None:
    written = audit.to_json()
    heads = [found for line in said.splitlines() if (found := re.match(r"(\S+):(\d+) ([A-Z]{3}\d{3}) ", line))]
    assert heads
    for file, number, code in (found.groups() for found in heads):
        places = {(kind["rule"], kind["source"]) for kind in written["findings"] if kind["severity"] != "info"}
        assert any(rule == code and str(line).endswith(f"{Path(file).name}:{number}") for rule, line in places)
    assert f"python -m auditor explain {heads[0][3]}" in said


def test_modules_in_fp32_stand_below_with_the_reason_that_plan_json_has(audit: Audit) -> None:
    fp16 = replace(audit, recommended="cast_fp16")
    plan = fp16.plans["cast_fp16"]
    assert plan.kept
    lines = " ".join(text.render(fp16, width=160, color=False).split())
    shown = [island for island in islands(plan) if not island.functions]
    assert sorted(path for island in shown for path in island.paths) == sorted(plan.kept)
    written = {
        path: reason["words"]
        for reason in fp16.to_json()["plans"]["cast_fp16"]["reasons"]
        for path in reason["modules"]
    }
    for island in shown[:ISLANDS_SHOWN]:
        assert f"FP32 {island.name} {island.because[0]}" in lines or f"FP32 {island.name}" in lines
        assert island.because[-1].split("; the others")[0] in {written[path] for path in island.paths} or (
            "lowering one of them adds" in island.because[-1]
        )


def test_more_modules_than_fit_are_counted(audit: Audit) -> None:
    names = [f"{letter}.x" for letter in "abcdefghi"]
    kept = tuple(Reason("unsafe", f"{name} is unsafe: it overflows", (name,)) for name in names)
    many = replace(audit.plans["cast_fp16"], reasons=kept, scopes={"": ScopeChoice("fp16")})
    said = text.render(
        replace(audit, plans={**audit.plans, many.name: many}, recommended=many.name), width=120, color=False
    )
    assert f"and {len(names) - ISLANDS_SHOWN} more, in plan.json" in said
    assert sum("- FP32" in line for line in said.splitlines()) == ISLANDS_SHOWN


def test_cautions_are_about_what_was_audited(audit: Audit, said: str) -> None:
    lines = " ".join(said.split())
    untested = {
        label(fmt): sum(node["verdicts"][fmt]["verdict"] == "untested" for node in audit.to_measurements()["nodes"])
        for fmt in audit.formats
    }
    for fmt, number in untested.items():
        assert (f"{number} operation" in lines and f"in {fmt}" in lines) == bool(number) or not number
    assert ("No GPU ran this" in lines) == (audit.environment.execution != "native")
    assert ("The weights are random" in lines) == audit.subject.random_weights
    assert ("The inputs were made up" in lines) == audit.subject.synthetic_inputs
    made_up = replace(audit, subject=replace(audit.subject, random_weights=True, synthetic_inputs=True))
    cautioned = " ".join(text.render(made_up, width=100, color=False).split())
    assert "The weights are random" in cautioned
    assert "The inputs were made up" in cautioned


def test_lines_of_training_are_its_record() -> None:
    torch.manual_seed(0)
    model, batch = nn.Linear(8, 8), (torch.randn(8, 8), torch.randn(8, 8))
    found = auditor.audit(model, batch, mode="training", loss_fn=nn.functional.mse_loss, strategies=("autocast",))
    assert found.training is not None
    said = text.render(found, width=200, color=False)
    assert f"Training  {sentence(found.training.recommendation)}" in re.sub(r"Training\s+", "Training  ", said)
    shown = [line.split("- ", 1)[1] for line in said.splitlines() if re.match(r"\s+- ", line)]
    titles = list(dict.fromkeys(advice.title for advice in found.training.advice))
    assert shown == titles[:ADVICE_SHOWN]
    twice = replace(found, training=replace(found.training, advice=2 * found.training.advice))
    assert text.render(twice, width=200, color=False) == said
    assert found.to_json()["training"]["recommendation"] == found.training.recommendation
