"""What a comparison takes from a plan.json: labels, settings, figures, verdicts."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from auditor.document.compared import Figures, read, record
from auditor.document.write import texts, to_document
from auditor.errors import PlanError
from tests.unit.report.factory import make_audit


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    """Both files in one."""
    found: dict[str, Any] = json.loads(json.dumps(to_document(make_audit(60))))
    return found


def test_both_files_are_compared_as_one_document_is(document: dict[str, Any], tmp_path: Path) -> None:
    whole = record(document, str(tmp_path), document)
    for name, text in texts(make_audit(60)).items():
        (tmp_path / name).write_text(text)
    for path in (tmp_path, tmp_path / "plan.json"):
        found = read(path)
        assert (found.settings, found.plans, found.nodes) == (whole.settings, whole.plans, whole.nodes)
        assert Counter((f.rule, f.owner, f.op, f.severity, f.source) for f in found.findings) == Counter(
            (f.rule, f.owner, f.op, f.severity, f.source) for f in whole.findings
        )
    assert len(whole.findings) > len(json.loads((tmp_path / "plan.json").read_text())["findings"])


def test_measurements_of_another_audit_are_not_taken_for_its_own(tmp_path: Path) -> None:
    for name, text in texts(make_audit(60)).items():
        (tmp_path / name).write_text(text)
    other = texts(make_audit(30))["measurements.json"]
    for spoilt in (other, "[", "[]", "[" * 100_000, '"', "\xff"):
        (tmp_path / "measurements.json").write_text(spoilt, encoding="latin-1")
        assert read(tmp_path).nodes == ()
    (tmp_path / "measurements.json").unlink()
    assert read(tmp_path).nodes == ()
    assert read(tmp_path).findings


def test_names_and_settings(document: dict[str, Any]) -> None:
    found = record(document, "before")
    assert (found.label, found.name, found.recommended) == ("before", "TinyGPT", "autocast_fp16")
    assert found.settings["parameters"] == "124439808"
    assert found.settings["budget"] == "0.01 relative L2 of the outputs"
    assert found.settings["execution"] == "cpu, emulated"
    assert found.settings["inputs"] == "int64[8, 128]"


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
    found = record(document, "", document).nodes[0]
    assert (found.owner, found.op, found.source) == (written["owner"], written["op"], written["source"])
    assert found.verdicts == {fmt: written[fmt]["verdict"] for fmt in ("fp16", "bf16")}


def test_a_file_a_directory_or_nothing(document: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(document))
    assert (read(file).label, read(tmp_path).label) == (str(file), str(tmp_path))
    with pytest.raises(PlanError) as caught:
        read(tmp_path / "elsewhere")
    assert caught.value.slug == "missing-plan"
