"""Programs of an audit that another one replaces."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from torch import nn

import auditor
from auditor.document.replaced import programs_in
from tests.subjects import normal


def test_programs_go_with_the_plan_that_names_them_and_nothing_else_does(tmp_path: Path) -> None:
    model, x = nn.Linear(8, 4), normal(2, 8)
    auditor.audit(model, (x,), formats=("bf16",), strategies=("graph",)).save(tmp_path)
    others = dict.fromkeys(("mine.pt2", "graph_fp16.pt2", "notes.txt"), b"mine")
    for name, text in others.items():
        (tmp_path / name).write_bytes(text)
    assert programs_in(tmp_path) == ("graph_bf16.pt2",)
    auditor.audit(model, (x,), formats=("bf16",), strategies=("cast",)).save(tmp_path)
    assert not (tmp_path / "graph_bf16.pt2").exists()
    assert {name: (tmp_path / name).read_bytes() for name in others} == others
    assert programs_in(tmp_path) == ()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"plans": 3}',
        '{"plans": {"a": 1}}',
        json.dumps({"plans": {"a": {"program": {"file": "../up.pt2", "onnx": {"file": "notes.txt"}}}}}),
        json.dumps({"plans": {"a": {"program": {"file": 3, "onnx": None}}}}),
    ],
)
def test_nothing_goes_by_a_plan_that_is_none(text: str, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(text)
    assert programs_in(tmp_path) == ()
