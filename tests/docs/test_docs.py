"""The documents say what the code says: errors, rules, options, agreement, the architecture, and the files that are written."""

import ast
import dataclasses
import inspect
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import nn

import auditor
from auditor.api import audit
from auditor.cli import VERBS, parser
from auditor.document.codec import texts
from auditor.document.reference import main as write_reference
from auditor.document.reference import with_tables
from auditor.report import model_explorer
from auditor.rulebook.explain import pages
from auditor.rulebook.facts import EACH
from auditor.rulebook.findings import classify
from auditor.rulebook.load import load_rules
from tests.docs.draw_architecture import page, summary
from tests.docs.options import DOCS, HEADS, STUB, stub, written
from tests.rules.examples import example
from tests.rules.test_repairs import error, low, outputs
from tests.support.capturing import captured
from tests.support.replaying import Model
from tests.support.structure import ORDER
from tests.unit.report.factory import AUDITS, make_audit


def text(name: str) -> str:
    """A document."""
    return (DOCS / name).read_text(encoding="utf-8")


POSITION = {"PydanticCustomError": 0, "call": 2, "tables": 1, "by_option": 2}  # target.call(function, what, slug), ...


def slug_of(call: ast.Call) -> ast.expr | None:
    """The argument that is a slug; None for a call that takes none."""
    for keyword in call.keywords:
        if keyword.arg == "slug":
            return keyword.value
    name = getattr(call.func, "attr", getattr(call.func, "id", ""))
    position = POSITION.get(name, 1 if name.endswith("Error") else None)
    return call.args[position] if position is not None and len(call.args) > position else None


def calls(root) -> Iterator[tuple[str, ast.Call]]:
    for path in sorted(root.glob("auditor/**/*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                yield f"{path.relative_to(root)}:{node.lineno}", node


def slugs_in_code(root) -> set[str]:
    found = (slug_of(call) for _, call in calls(root))
    return {node.value for node in found if isinstance(node, ast.Constant) and isinstance(node.value, str)}


def test_every_slug_is_explained_and_none_is_stale(root):
    assert sorted(re.findall(r"(?m)^### (\S+)$", text("errors.md"))) == sorted(slugs_in_code(root))


def test_every_error_that_is_raised_has_a_slug(root):
    ours = {
        node.name
        for node in ast.walk(ast.parse((root / "auditor" / "errors.py").read_text()))
        if hasattr(node, "bases")
    }
    assert "PlanError" in ours
    without = [place for place, call in calls(root) if getattr(call.func, "id", "") in ours and slug_of(call) is None]
    assert without == []


def test_every_entry_says_what_it_means_and_what_to_do():
    entries = re.split(r"(?m)^### \S+$", text("errors.md"))[1:]
    assert entries
    for entry in entries:
        body = entry.partition("\n## ")[0].strip()
        assert len(body.split(". ")) >= 2 or len(body.splitlines()) >= 2, body


# docs/rules.md and docs/rules/ against the rules and the facts they are generated from.


def test_committed_pages_are_up_to_date(root):
    written = pages(load_rules())
    assert {name: text(name) for name in written} == written, "run `make docs`"
    committed = {f"rules/{file.name}" for file in (root / "docs" / "rules").iterdir()}
    assert committed == written.keys() - {"rules.md"}


def test_the_rule_shown_to_those_who_write_their_own_is_one(tmp_path):
    shown = re.search(r"(?s)## Rules of your own\n.*?```toml\n(.*?)```", text("own-rules.md"))[1]
    path = tmp_path / "own" / "OWN001-tangent-near-a-pole.toml"
    path.parent.mkdir()
    path.write_text(shown)
    (rule,) = load_rules([tmp_path])
    model, inputs = example(rule)
    toy = captured(model, *inputs)
    assert [finding.node for finding in classify(toy.capture, toy.facts, [rule])] == ["tan"]
    assert rule.example is not None
    repaired = dataclasses.replace(rule.example, code=rule.example.fixed)
    fixed, _ = example(dataclasses.replace(rule, example=repaired))
    assert error(outputs(model, inputs), low(model, inputs, "fp16", "cast")) > 0.03
    assert error(outputs(model, inputs), low(fixed, inputs, "fp16", "cast")) < 1e-3


# docs/command-line.md and docs/api.md against the parsers and the code: nothing missing, nothing stale.


@pytest.mark.parametrize("document", HEADS)
def test_the_tables_of_options_are_those_of_the_settings(document):
    assert written(document) == text(document), "run `make docs`"


def test_editors_see_the_arguments_of_the_settings():
    assert stub() == STUB.read_text(encoding="utf-8"), "run `make docs`"


def test_every_option_of_every_verb_is_described():
    options = {name for part in parser().parts.values() for action in part._actions for name in action.option_strings}
    options -= {name for name in options if name.startswith("--no-")}
    named = set(re.findall(r"`(--?[a-z][a-z-]*)", text("command-line.md"))) - {"--no-quick", "--no-measure-time"}
    assert options - {"-h", "--help"} == named


def test_every_verb_is_described():
    for verb in set(VERBS) - {"audit"}:
        assert re.search(rf"^\| `{verb}\b", text("command-line.md"), re.MULTILINE), verb


def test_every_public_name_argument_and_field_is_described():
    api = text("api.md")
    for name in set(auditor.__all__) - {"__version__"}:
        assert f"`{name}`" in api
        assert f"auditor.{name}(" in api or f"## `{name}`" in api
    parameters = [p for p in inspect.signature(auditor.audit).parameters if p != "self"]
    fields = [field.name for field in dataclasses.fields(auditor.Audit)]
    for name in (*parameters, *fields):
        assert f"`{name}`" in api, name


# docs/architecture.md says what the code is: its table is the one that the imports give today.


def test_the_table_has_every_room_with_its_own_words() -> None:
    assert text("architecture.md") == page(text("architecture.md")), "run `make docs`"
    assert [room for room in ORDER if not summary(room).endswith(".")] == []


def test_a_stranger_reads_45_files_at_most() -> None:
    listed = text("architecture.md").partition("## In what order to read")[2].partition("##")[0]
    named = re.findall(r"`auditor/[\w/]+\.py`", listed)
    assert 20 <= len(named) == len(set(named)) <= 45


# benchmarks/results/agreement.md against the rules: what a rule claims of itself follows from how it fared.

RULES = {rule.code: rule for rule in load_rules() if EACH not in rule.formats}
"""Those of no certain format speak of FP8 and what is registered, which the table leaves out."""
ENOUGH = 5
BOUNDS = {"high": (0.6, 1.0), "medium": (0.2, 1.0), "low": (0.0, 0.6)}
"""What share of a rule's predictions the measurement bears out, by the confidence in its file."""


@dataclass(frozen=True)
class Row:
    """A line of the table; fired, agreed: operations, over failing and sound models."""

    claims: tuple[str, str, str]
    fired: int
    agreed: int


@pytest.fixture(scope="module")
def rows(root: Path) -> dict[str, Row]:
    written = (root / "benchmarks" / "results" / "agreement.md").read_text(encoding="utf-8")
    found = {}
    for line in re.findall(r"(?m)^\| [A-Z]{3}\d{3} \|.*$", written):
        code, name, severity, confidence, *shares, _ = (cell.strip() for cell in line.strip("|").split("|"))
        counts = [tuple(map(int, share.split(" of "))) for share in shares if share]
        found[code] = Row((name, severity, confidence), sum(c[1] for c in counts), sum(c[0] for c in counts))
    return found


def test_it_speaks_of_the_rules_as_they_are(rows: dict[str, Row]) -> None:
    held = {code: (RULES[code].name, RULES[code].severity, RULES[code].confidence) for code in rows}
    assert {code: row.claims for code, row in rows.items()} == held


def test_confidence_follows_from_how_often_the_measurement_agrees(rows: dict[str, Row]) -> None:
    off = {
        code: f"{row.claims[2]}, and {row.agreed} of {row.fired} predictions hold"
        for code, row in rows.items()
        if row.fired >= ENOUGH and not BOUNDS[row.claims[2]][0] <= row.agreed / row.fired <= BOUNDS[row.claims[2]][1]
    }
    assert off == {}


# docs/model-explorer.schema.json against what is written, and overlays against the graph they are laid over.

jsonschema = pytest.importorskip("jsonschema")


@pytest.fixture(scope="module")
def schema():
    return json.loads(text("model-explorer.schema.json"))


def part(schema, name):
    return jsonschema.Draft202012Validator({**schema, "$ref": f"#/$defs/{name}"})


@pytest.mark.parametrize("name", AUDITS)
def test_files_follow_the_schema(schema, name):
    texts = model_explorer.files(make_audit(**AUDITS[name]))
    documents = {file: json.loads(made) for file, made in texts.items()}
    part(schema, "graphCollection").validate(documents.pop("graph.json"))
    for document in documents.values():
        part(schema, "overlay").validate(document)


def test_overlays_and_edges_name_nodes_of_the_graph():
    documents = {file: json.loads(made) for file, made in model_explorer.files(make_audit()).items()}
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


# The schemas in docs/ and docs/plan-json.md are what the records say, and hold for what an audit really writes.


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


def test_a_record_without_a_table_is_told_where_to_add_it():
    with pytest.raises(ValueError, match=r"docs/plan-json\.md lacks .*Finding.*: add a heading for each"):
        with_tables("# A page without tables")


def test_all_are_as_generated(tmp_path):
    for name in ("plan-json.md", "emulation.md"):
        (tmp_path / name).write_text(text(name), encoding="utf-8")
    write_reference(tmp_path)
    for name in ("plan-json.md", "emulation.md", *(f"{name}.schema.json" for name in SCHEMAS)):
        assert (tmp_path / name).read_text(encoding="utf-8") == text(name), "run `make docs`"
