"""The schemas in docs/ and docs/plan-json.md are what the records say, and hold for what an audit really writes."""

import copy
import json
import re

import pytest
import torch
from torch import nn

from auditor.api import audit
from auditor.document.codec import texts
from auditor.document.reference import json_schema, with_tables
from tests.support.replaying import Model
from tests.unit.report.factory import AUDITS, make_audit

jsonschema = pytest.importorskip("jsonschema")

SCHEMAS = ("plan", "measurements")


@pytest.fixture(scope="module")
def schemas(root) -> dict:
    return {name: json.loads((root / "docs" / f"{name}.schema.json").read_text(encoding="utf-8")) for name in SCHEMAS}


@pytest.fixture(scope="module")
def strict(schemas):
    """Validators that also refuse fields the schema does not know: an undocumented field must not slip through."""

    def close(part):
        if isinstance(part, dict):
            part = {key: close(value) for key, value in part.items()}
            if "properties" in part and "additionalProperties" not in part:
                part["additionalProperties"] = False
        return part

    return {name: jsonschema.Draft202012Validator(close(schema)) for name, schema in schemas.items()}


@pytest.fixture(scope="module")
def real() -> dict:
    """An audit of a model with an overflow, a discrete output and a rule that fires, as it would be read from disk."""

    def forward(m, x):
        scores = m.layer(x).masked_fill(x[:, :4] > 0, -1e9).softmax(-1)
        return scores, scores.argmax(-1)

    torch.manual_seed(0)
    return both(audit(Model(forward, layer=nn.Linear(8, 4)), torch.randn(16, 8)))


def both(found) -> dict:
    """What the two files hold, by the names of their schemas."""
    return {name.removesuffix(".json"): json.loads(text) for name, text in texts(found).items()}


@pytest.mark.parametrize("name", AUDITS)
def test_made_up_audits_follow_it(name, strict):
    for schema, document in both(make_audit(**AUDITS[name])).items():
        assert [error.message for error in strict[schema].iter_errors(document)] == []


def test_a_real_audit_follows_it(strict, real):
    for name in SCHEMAS:
        assert [f"{error.json_path}: {error.message}" for error in strict[name].iter_errors(real[name])] == []
    nodes = real["measurements"]["nodes"]
    assert {"unsafe", "safe"} <= {node["verdicts"]["fp16"]["verdict"] for node in nodes}
    assert real["plan"]["findings"]


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("plan", "format_version"), 2),
        (("plan", "recommended"), 3),
        (("plan", "findings", 0, "severity"), "fatal"),
        (("measurements", "findings", 0, "why"), 3),
        (("plan", "undocumented"), 1),
        (("measurements", "undocumented"), 1),
    ],
)
def test_what_is_wrong_is_noticed(path, value, strict, real):
    changed = copy.deepcopy(real)
    place = changed
    for part in path[:-1]:
        place = place[part]
    place[path[-1]] = value
    assert not strict[path[0]].is_valid(changed[path[0]])
    assert not strict["plan"].is_valid({key: value for key, value in real["plan"].items() if key != "plans"})


def test_every_field_is_described_and_none_is_stale(root, schemas):
    text = (root / "docs" / "plan-json.md").read_text(encoding="utf-8")
    described = set()
    for cell in re.findall(r"(?m)^\| (`.+?) \|", text):
        described |= set(re.findall(r"`(\w+)`", cell))
    fields = set()
    for schema in schemas.values():
        for part in (schema, *schema["$defs"].values()):
            fields |= set(part["properties"])
    assert described == fields


def test_both_are_as_generated(root):
    docs = root / "docs"
    for name in SCHEMAS:
        written = (docs / f"{name}.schema.json").read_text(encoding="utf-8")
        assert written == json_schema(f"{name}.json"), "run `make docs`"
    text = (docs / "plan-json.md").read_text(encoding="utf-8")
    assert text == with_tables(text), "run `make docs`"
