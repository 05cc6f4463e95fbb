"""What a comparison takes from a plan.json: labels, settings, figures, verdicts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from auditor.document.compared import Figures, read, record
from auditor.errors import PlanError
from tests.unit.report.factory import make_audit


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(json.dumps(make_audit(60).to_json()))
    return found


def test_names_and_settings(document: dict[str, Any]) -> None:
    found = record(document, "before")
    assert (found.label, found.name, found.recommended) == ("before", "TinyGPT", "autocast_fp16")
    assert found.settings["parameters"] == "124439808"
    assert found.settings["budget"] == "0.01 relative L2 of the outputs"
    assert found.settings["execution"] == "cpu, emulated"
    assert found.settings["inputs"] == "tokens: int64[8, 128]"


def test_figures_of_plans(document: dict[str, Any]) -> None:
    plans = record(document, "").plans
    # two islands: the module of RNG001, and the norm
    assert plans["autocast_fp16"] == Figures("fp16", 0.0008, 0.00083, 1.87, True, 2)
    assert plans["cast_bf16"] == Figures("bf16", 0.0061, None, 1.87, False, 0)


def test_an_fp32_plan_has_islands_of_low_precision(document: dict[str, Any]) -> None:
    scopes = {"": {"precision": "fp32"}, "a": {"precision": "fp16"}, "a.b": {"precision": "fp32"}}
    plans = {**document["plans"], "cast_bf16": {**document["plans"]["cast_bf16"], "scopes": scopes}}
    assert record({**document, "plans": plans}, "").plans["cast_bf16"].islands == 1


def test_verdicts_by_format(document: dict[str, Any]) -> None:
    written = document["nodes"][0]
    found = record(document, "").nodes[0]
    assert (found.owner, found.op, found.source) == (written["owner"], written["op"], written["source"])
    assert found.verdicts == {fmt: written[fmt]["verdict"] for fmt in ("fp16", "bf16")}


def test_a_file_a_directory_or_nothing(document: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(document))
    assert (read(file).label, read(tmp_path).label) == (str(file), str(tmp_path))
    with pytest.raises(PlanError) as caught:
        read(tmp_path / "elsewhere")
    assert caught.value.slug == "missing-plan"
