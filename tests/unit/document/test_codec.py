"""What is written of an audit is strict JSON in the shape of its records, and is read back as it was."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import auditor
from auditor.capture.places import from_repository, portable, portable_path
from auditor.capture.source import is_installed
from auditor.document.codec import (
    adapter,
    digest,
    laid_out,
    merge,
    steady,
    texts,
    to_document,
    to_measurements,
    to_plan,
)
from auditor.document.read import ALONE
from auditor.document.reference import objects, with_tables
from auditor.records import Audit, Environment, Finding, FlaggedRegion, NodeReport, Plan, Verification, Weight
from auditor.records.training import Training
from auditor.records.written import plain
from auditor.reporters import REPORTERS
from auditor.results import load
from tests.support.documents import records
from tests.support.replaying import Model
from tests.unit.report.factory import AUDITS, make_audit


def forward(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    x = m.second(m.first(x).relu() * 1e6) / 1e6
    scores = m.by_name["a/b~c"](x).masked_fill(x[:, :4] > 9, -1e9).softmax(-1)
    return scores, scores.argmax(-1)


def seeded() -> nn.Module:
    """An overflow in FP16, a discrete output, two names of one weight, a path with a slash."""
    torch.manual_seed(0)
    first, second = nn.Linear(8, 8), nn.Linear(8, 8)
    second.weight = first.weight
    return Model(forward, first=first, second=second, by_name=nn.ModuleDict({"a/b~c": nn.Linear(8, 4)}))


@pytest.fixture(scope="module")
def real() -> Audit:
    return auditor.audit(seeded(), torch.randn(16, 8), device="cpu")


@pytest.mark.parametrize(
    "kind", [Plan, Verification, NodeReport, Weight, FlaggedRegion, Finding, Environment, Training]
)
@settings(
    max_examples=15,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
    phases=(Phase.explicit, Phase.generate),
)
@given(data=st.data())
def test_any_record_is_read_as_it_was_written(kind: type, data: st.DataObject) -> None:
    record = data.draw(records(kind))
    written = adapter(kind).dump_python(record, mode="json", warnings="error")
    in_files = [field.name for field in dataclasses.fields(kind) if not str(field.type).startswith("Unwritten")]
    assert list(written) == in_files
    again = adapter(kind).validate_json(json.dumps(written, allow_nan=False), strict=True)
    assert adapter(kind).dump_python(again, mode="json") == written


def told(audit: Audit) -> dict[str, str]:
    """All that reporters say of it."""
    return {name: REPORTERS[name](audit) for name in REPORTERS}


def check(audit: Audit, folder: Path) -> Audit:
    """It comes back from its files with everything; what is found."""
    audit.save(folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    found = load(folder)
    for name, text in texts(found).items():
        json.loads(text, parse_constant=pytest.fail)
        assert text.encode() == before[name]
    assert told(found) == told(audit)
    found.save(folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    return found


def test_a_real_audit_comes_back_whole(real: Audit, tmp_path: Path) -> None:
    found = check(real, tmp_path)
    assert real.environment.seconds.keys() >= {"capture", "measure", "plan"}
    assert (found.live, found.environment) == (None, dataclasses.replace(real.environment, seconds={}))
    assert found.tied_parameters == (("first.weight", "second.weight"),)
    errors = [(a.errors["fp16"], b.errors["fp16"]) for a, b in zip(real.nodes, found.nodes, strict=True) if a.errors]
    assert any(a.local_error == math.inf == b.local_error for a, b in errors)
    assert [r.verdicts for r in found.nodes] == [r.verdicts for r in real.nodes]
    for name, plan in found.plans.items():
        assert (plan.scopes.keys(), plan.is_verified) == (real.plans[name].scopes.keys(), real.plans[name].is_verified)


def test_a_plan_alone_or_beside_other_measurements_says_what_is_not_there(real: Audit, tmp_path: Path) -> None:
    real.save(tmp_path)
    plan = json.loads((tmp_path / "plan.json").read_text())
    ran = plan["plans"]["cast_fp16"]["verification"]
    ran["holds"] = not ran["holds"]
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    for spoilt in (texts(make_audit(30))["measurements.json"], "[", "[]", "[" * 100_000, "\xff", None):
        if spoilt:
            (tmp_path / "measurements.json").write_text(spoilt, encoding="latin-1")
        found = load(tmp_path)
        assert found.nodes == ()
        assert found.warnings[-1] == ALONE
    expected = [(f.rule, f.owner, f.severity) for f in real.findings]
    assert [(f.rule, f.owner, f.severity) for f in found.findings] == expected
    assert all(told(found).values())
    assert ALONE in " ".join(told(found)["md"].split())


@pytest.mark.parametrize("kind", AUDITS)
def test_made_up_audits_come_back_and_each_file_has_its_share(kind: str, tmp_path: Path) -> None:
    audit = check(make_audit(**AUDITS[kind]), tmp_path)
    plan, beside, whole = to_plan(audit), to_measurements(audit), to_document(audit)
    assert not plan.keys() & {"nodes", "weights", "regions"}
    assert all("note" not in one for one in plan["plans"].values())
    assert beside.pop("plan") == digest(json.loads(texts(audit)["plan.json"]))
    assert merge(plan, beside) == whole


def test_numbers_have_seven_digits_and_what_is_not_finite_a_text() -> None:
    assert plain([0.123456789, 1.0, 1e-300, 65504.0]) == [0.1234568, 1.0, 1e-300, 65504.0]
    assert plain([math.inf, -math.inf, math.nan]) == ["Infinity", "-Infinity", "NaN"]
    evidence = {"length": 3, "values": (1.5, math.inf), "nested": {1: {math.nan}}, "flag": True, "odd": object}
    assert plain(evidence) == {
        "length": 3,
        "values": [1.5, "Infinity"],
        "nested": {"1": ["NaN"]},
        "flag": True,
        "odd": str(object),
    }


def test_what_stages_took_is_left_out_of_comparisons() -> None:
    slow, quick = ({"environment": {"seed": 0, "seconds": {"plan": spent}}, "plans": {}} for spent in (9.0, 1.0))
    assert digest(slow) == digest(quick) == digest({"environment": {"seed": 0}, "plans": {}})
    assert digest(slow) != digest({**slow, "environment": {"seed": 1, "seconds": {"plan": 9.0}}})
    assert steady(slow) == {"environment": {"seed": 0}, "plans": {}}
    assert (steady([1]), steady({"environment": 3})) == ([1], {"environment": 3})


# Files laid out by line: the same data, no line without need, and a short object on each.


PLAIN = st.none() | st.booleans() | st.integers() | st.text(max_size=60)
TREES = st.recursive(PLAIN, lambda inside: st.lists(inside) | st.dictionaries(st.text(max_size=9), inside))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(TREES)
def test_what_is_laid_out_is_the_same_data(tree: Any) -> None:
    assert json.loads(laid_out(tree)) == tree
    assert json.loads(laid_out(tree, 2)) == tree


def test_what_fits_or_lies_deep_stands_on_one_line() -> None:
    nodes = [{"a": number, "b": ["x" * 250] * number} for number in (1, 2)]
    head = ["{", ' "n": 1,', ' "nodes": [']
    assert laid_out({"n": 1, "nodes": nodes}, 2).splitlines() == [
        *head,
        f"  {json.dumps(nodes[0])},",
        f"  {json.dumps(nodes[1])}",
        " ]",
        "}",
    ]
    assert laid_out({"n": 1, "nodes": nodes}).splitlines()[:6] == [*head, "  {", '   "a": 1,', '   "b": [']


# Files as seen from their repository, wherever that lies.


def test_a_file_is_seen_from_its_repository_or_the_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("repo/.git", "repo/models", "work"):
        (tmp_path / folder).mkdir(parents=True)
    for folder, file, said in (
        ("repo", "repo/models/net.py", "models/net.py"),
        (".", "repo/models/net.py", "models/net.py"),
        (".", "work/net.py", "work/net.py"),
        ("work", "net.py", "net.py"),
    ):
        monkeypatch.chdir(tmp_path / folder)
        assert from_repository(tmp_path / file) == said
    path = "/home/me/env/lib/python3.12/site-packages/timm/layers/mlp.py"
    assert portable_path(path) == "site-packages/timm/layers/mlp.py" == portable_path(portable_path(path))
    assert is_installed(path) and is_installed(portable_path(path))
    assert not is_installed("model.py")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("/nowhere/at/all/net.py:build", "net.py:build"),
        ("net.py:build", "net.py:build"),
        ("sub/net.py:Net(width=8)", "sub/net.py:Net(width=8)"),
        ("--weights /nowhere/w.pt", "--weights w.pt"),
        ("hf:/nowhere/model", "hf:model"),
        ("hf:org/name@main", "hf:org/name@main"),
        ("https://example.org/a", "https://example.org/a"),
        ("~/net.py, ../net.py", "~/net.py, ../net.py"),
        ("random initialization, seed 0", "random initialization, seed 0"),
    ],
)
def test_a_text_keeps_no_absolute_path(text: str, said: str) -> None:
    assert portable(text) == said


# The generated parts of the documents: a schema that says what is written, and tables put where a page wants them.


def page(*names: str) -> str:
    return "\n".join(f"# {name}\n<!-- fields: {name} -->\nstale\n<!-- end of fields -->\nkept" for name in names)


def test_tables_are_written_afresh_and_the_rest_is_kept() -> None:
    names = list(objects())
    found = with_tables(page(*names))
    assert "stale" not in found
    assert found.count("\nkept") == len(names)
    assert "| `note` (measurements.json) | " in found
    assert with_tables(found) == found
