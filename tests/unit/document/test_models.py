"""What is written of any record is read back as it was, and is what the schema promises."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from auditor.document.models import READERS, WRITER, model_of
from auditor.document.parts import MEASUREMENTS, PLAN, WHOLE, part_of
from auditor.document.reference import json_schema
from auditor.document.write import written
from auditor.records import Baseline, Finding, FlaggedRegion, NodeReport, Plan, ScopeChoice, Weight
from auditor.records.audit import Environment
from auditor.records.training import Training
from tests.documents import records

jsonschema = pytest.importorskip("jsonschema")

FILES = (PLAN, MEASUREMENTS, WHOLE)
KINDS = (Plan, Baseline, NodeReport, Weight, FlaggedRegion, Finding, Environment, Training)
NO_SHRINKING = (Phase.explicit, Phase.generate)
PLAN_DEFS, DEFS = (json.loads(json_schema(file))["$defs"] for file in ("plan.json", "measurements.json"))


def validator(name: str) -> Any:
    """Of one kind of object, in the file that has it."""
    defs = DEFS if name in DEFS else PLAN_DEFS
    return jsonschema.Draft202012Validator({"$defs": defs, "$ref": f"#/$defs/{name}"})


def plain(found: Any) -> Any:
    """What a model was read from, in the order of its keys."""
    return found.model_dump(exclude_unset=True)


@pytest.mark.parametrize("kind", KINDS)
@settings(
    max_examples=12, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck), phases=NO_SHRINKING
)
@given(data=st.data())
def test_what_is_written_is_read_as_it_was(kind: type, data: st.DataObject) -> None:
    record = data.draw(records(kind))
    for file in FILES:
        if not part_of(kind, file).entries:
            continue
        text = json.dumps(written(record, file), allow_nan=False)
        document = json.loads(text)
        if file != WHOLE:
            assert [error.message for error in validator(part_of(kind, file).name).iter_errors(document)] == []
        for reader in (*READERS, WRITER):
            found = model_of(kind, reader, file).model_validate(document)
            assert plain(found) == document
        again = model_of(kind, WRITER, file).model_validate(plain(found))
        assert again == found


def test_fields_have_the_values_of_the_record() -> None:
    plan = Plan(
        "x", "cast", "fp16", {"": ScopeChoice("fp16", ("A",), "keep", 0.5)}, 0.25, 1.0, 1.5, pareto=((0.5, 1.0),)
    )
    found: Any = model_of(Plan, WRITER).model_validate(written(plan))
    kept = [entry.key for entry in part_of(Plan).entries if entry.key in vars(plan)]
    assert {"strategy", "scopes", "predicted_error", "verified", "pareto"} <= set(kept)
    for key in kept:
        if key not in ("scopes", "pareto", "reasons"):
            assert getattr(found, key) == getattr(plan, key)
    choice = found.scopes[""]
    assert (choice.precision, tuple(choice.because), choice.output, choice.cost) == ("fp16", ("A",), "keep", 0.5)
    assert choice.keep == ()  # as of files that know no functions in FP32
    assert found.pareto == [[0.5, 1.0]]


def test_what_a_reader_can_do_without_has_the_default_of_the_record() -> None:
    found: Any = model_of(Plan, "plan").model_validate(
        {"strategy": "cast", "format": "fp16", "scopes": {"": {"precision": "fp16"}}}
    )
    assert (found.verified, found.measured_error, found.predicted_error, found.worst_output_error) == (
        False,
        None,
        None,
        None,
    )
    assert (found.scopes[""].output, found.scopes[""].because) == ("cast", ())


@pytest.mark.parametrize(
    ("more", "kept"),
    [
        ({"fp16": {"verdict": "safe"}}, {"fp16"}),
        ({"e6m9": {"verdict": "safe"}}, {"e6m9"}),  # a format that no plan of the file is in
        ({"depth": 3, "note": "of a later version"}, set()),
    ],
)
def test_further_keys_of_a_node_are_formats_or_of_a_later_version(more: dict[str, Any], kept: set[str]) -> None:
    node = {"name": "n", "op": "aten.exp.default", "owner": ""}
    found: Any = model_of(NodeReport, "audit").model_validate({**node, **more}, context=frozenset({"fp16"}))
    assert set(found.formats()) == kept
