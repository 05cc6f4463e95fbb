"""docs/plan.schema.json and docs/plan-json.md are what the records say, and hold for what an audit really writes."""

from __future__ import annotations

import copy
import json
import re

import pytest
import torch
from torch import nn

from auditor.api import audit
from auditor.document.reference import json_schema, with_tables
from tests.unit.report.factory import make_audit

jsonschema = pytest.importorskip("jsonschema")

AUDITS = {
    "usual": {},
    "hostile": {"nodes": 60, "hostile": True, "synthetic": True},
    "empty": {"empty": True},
    "one format": {"nodes": 30, "formats": ("bf16",), "recommended": None},
}


@pytest.fixture(scope="module")
def schema(root) -> dict:
    return json.loads((root / "docs" / "plan.schema.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def strict(schema):
    """A validator that also refuses fields the schema does not know: an undocumented field must not slip through."""

    def close(part):
        if isinstance(part, dict):
            part = {key: close(value) for key, value in part.items()}
            if "properties" in part and "additionalProperties" not in part:
                part["additionalProperties"] = False
        return part

    return jsonschema.Draft202012Validator(close(schema))


@pytest.fixture(scope="module")
def real() -> dict:
    """An audit of a model with an overflow, a discrete output and a rule that fires, as it would be read from disk."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 4)

        def forward(self, x):
            scores = self.layer(x).masked_fill(x[:, :4] > 0, -1e9).softmax(-1)
            return scores, scores.argmax(-1)

    torch.manual_seed(0)
    found = audit(Net(), torch.randn(16, 8))
    return json.loads(json.dumps(found.to_json(), allow_nan=False))


def test_schema_is_a_schema(schema):
    jsonschema.Draft202012Validator.check_schema(schema)


@pytest.mark.parametrize("name", AUDITS)
def test_made_up_audits_follow_it(name, strict):
    document = json.loads(json.dumps(make_audit(**AUDITS[name]).to_json(), allow_nan=False))
    assert [error.message for error in strict.iter_errors(document)] == []


def test_a_real_audit_follows_it(strict, real):
    assert [f"{error.json_path}: {error.message}" for error in strict.iter_errors(real)] == []
    assert {"unsafe", "safe"} <= {node["fp16"]["verdict"] for node in real["nodes"] if "fp16" in node}
    assert real["findings"]


def without(document: dict, *path: str) -> dict:
    changed = copy.deepcopy(document)
    place = changed
    for part in path[:-1]:
        place = place[part]
    del place[path[-1]]
    return changed


@pytest.mark.parametrize(
    "path",
    [
        ("format_version",),
        ("subject", "parameters"),
        ("plans", "cast_bf16", "scopes", ""),
        ("plans", "cast_bf16", "scopes", "", "precision"),
        ("plans", "cast_bf16", "verified"),
        ("baselines", "cast_bf16", "finite"),
        ("nodes", 0, "fp16", "verdict"),
    ],
)
def test_what_is_missing_is_noticed(path, strict, real):
    assert not strict.is_valid(without(real, *path))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("format_version",), 2),
        (("recommended",), "fast"),
        (("plans", "cast_bf16", "strategy"), None),
        (("plans", "cast_bf16", "measured_error"), "0.1"),
        (("nodes", 0, "fp16", "verdict"), "fine"),
        (("nodes", 0, "owner"), None),
        (("findings", 0, "severity"), "fatal"),
        (("undocumented",), 1),
    ],
)
def test_what_is_wrong_is_noticed(path, value, strict, real):
    changed = copy.deepcopy(real)
    place = changed
    for part in path[:-1]:
        place = place[part]
    place[path[-1]] = value
    assert not strict.is_valid(changed)


def test_every_field_is_described_and_none_is_stale(root, schema):
    text = (root / "docs" / "plan-json.md").read_text(encoding="utf-8")
    described = set()
    for cell in re.findall(r"(?m)^\| (`.+?) \|", text):
        described |= set(re.findall(r"`(\w+)`", cell))
    fields = set(schema["properties"])
    for part in schema["$defs"].values():
        fields |= set(part["properties"])
    assert described == fields


def test_both_are_as_generated(root):
    docs = root / "docs"
    assert (docs / "plan.schema.json").read_text(encoding="utf-8") == json_schema(), "run `make docs`"
    text = (docs / "plan-json.md").read_text(encoding="utf-8")
    assert text == with_tables(text), "run `make docs`"
