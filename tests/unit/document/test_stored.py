"""A plan.json from earlier and a model of today become the text of a patched_model.py."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from auditor.document.stored import patched_source, read_plans
from auditor.errors import PlanError
from auditor.records import Origin, Subject
from tests.patching import AUTOCAST, CAST, Net
from tests.subjects import seeded, subject_of


def document(**plans: Any) -> dict[str, Any]:
    parameters = sum(parameter.numel() for parameter in Net().parameters())
    return {"format_version": 1, "model": {"parameters": parameters}, "recommended": "cast_bf16", "plans": plans}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(document(autocast_bf16=AUTOCAST, cast_bf16=CAST)))
    return path


def test_plans_become_records_and_the_recommended_one_is_taken(file: Path) -> None:
    found, plans, name = read_plans(file, None)
    assert (found["recommended"], name) == ("cast_bf16", "cast_bf16")
    assert set(plans) == {"autocast_bf16", "cast_bf16"}
    cast = plans["cast_bf16"]
    assert (cast.strategy, cast.format, cast.measured_error) == ("cast", "bf16", None)
    assert {path: (choice.precision, choice.output) for path, choice in cast.scopes.items()} == {
        "": ("bf16", "cast"),
        "norm": ("fp32", "cast"),
        "head.2": ("fp32", "keep"),
    }


def test_another_plan_by_name_or_none_of_that_name(file: Path) -> None:
    assert read_plans(file, "autocast_bf16")[2] == "autocast_bf16"
    with pytest.raises(PlanError) as caught:
        read_plans(file, "cast_fp16")
    assert caught.value.slug == "no-such-plan"


def subject(tmp_path: Path) -> Subject:
    origin = Origin(str(tmp_path / "model.py"), None, "Net", "class")
    return replace(subject_of(seeded(Net), torch.ones(1, 4)), origin=origin)


def test_the_text_holds_every_plan(file: Path, tmp_path: Path) -> None:
    found, plans, name = read_plans(file, None)
    text = patched_source(subject(tmp_path), found, plans, name, tmp_path)
    compile(text, "patched_model.py", "exec")
    assert "autocast_bf16" in text
    assert "cast_bf16" in text


def test_a_plan_of_another_model_is_refused(file: Path, tmp_path: Path) -> None:
    found, plans, name = read_plans(file, None)
    other = replace(subject(tmp_path), model=torch.nn.Linear(4, 4))
    with pytest.raises(PlanError) as caught:
        patched_source(other, found, plans, name, tmp_path)
    assert caught.value.slug == "plan-mismatch"


def test_what_one_plan_rounds_the_next_may_want_in_fp32(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(document(cast_bf16=CAST, autocast_bf16=AUTOCAST)))
    found, plans, name = read_plans(file, None)
    model = subject(tmp_path)
    assert "autocast_bf16" in patched_source(model, found, plans, name, tmp_path)
    assert {parameter.dtype for parameter in model.model.parameters()} == {torch.float32}


def test_what_was_stored_low_in_the_audit_is_handed_on(tmp_path: Path) -> None:
    low = {**AUTOCAST, "raised": "weights", "stored_low": {"bfloat16": 10**6}}
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(document(autocast_bf16=low, cast_bf16=CAST)))
    found, plans, _ = read_plans(file, None)
    model = subject(tmp_path)
    model.model.bfloat16()
    text = patched_source(model, found, {"autocast_bf16": plans["autocast_bf16"]}, "autocast_bf16", tmp_path)
    assert "'raised': 'weights',\n        'stored_low': {'bfloat16': 1000000}," in text
    with pytest.raises(PlanError, match="load the FP32 checkpoint"):
        patched_source(model, found, plans, "cast_bf16", tmp_path)
