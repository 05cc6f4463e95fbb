"""docs/model-explorer.schema.json against what is written, and overlays against the graph they are laid over."""

from __future__ import annotations

import json

import pytest

from auditor.report import model_explorer
from tests.unit.report.factory import make_audit

jsonschema = pytest.importorskip("jsonschema")

AUDITS = {
    "usual": {},
    "hostile": {"nodes": 60, "hostile": True},
    "empty": {"empty": True},
    "one format": {"nodes": 30, "formats": ("bf16",), "recommended": None},
}


@pytest.fixture(scope="module")
def schema(root):
    return json.loads((root / "docs" / "model-explorer.schema.json").read_text(encoding="utf-8"))


def part(schema, name):
    return jsonschema.Draft202012Validator({**schema, "$ref": f"#/$defs/{name}"})


@pytest.mark.parametrize("name", AUDITS)
def test_files_follow_the_schema(schema, name):
    texts = model_explorer.files(make_audit(**AUDITS[name]))
    documents = {file: json.loads(text) for file, text in texts.items()}
    part(schema, "graphCollection").validate(documents.pop("graph.json"))
    for document in documents.values():
        part(schema, "overlay").validate(document)


def test_overlays_and_edges_name_nodes_of_the_graph():
    documents = {file: json.loads(text) for file, text in model_explorer.files(make_audit()).items()}
    (graph,) = documents.pop("graph.json")["graphs"]
    names = [node["id"] for node in graph["nodes"]]
    assert len(set(names)) == len(names)
    assert {edge["sourceNodeId"] for node in graph["nodes"] for edge in node["incomingEdges"]} <= set(names)
    for document in documents.values():
        assert set(document) == {graph["id"]}
        assert set(document[graph["id"]]["results"]) <= set(names)
        assert document[graph["id"]]["results"]


def test_what_is_not_finite_stands_above_all_else():
    overlay = json.loads(model_explorer.files(make_audit())["fp16_effect.json"])["graph"]["results"]
    audit = make_audit()
    broken = next(r.node.name for r in audit.nodes if r.node.op.startswith("aten") and "RNG001" in r.findings)
    assert overlay[broken]["value"] == max(item["value"] for item in overlay.values())
