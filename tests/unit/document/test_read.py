"""Whatever a plan.json holds, it is read, or refused in one line with a path and a piece of advice."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from auditor.document.compared import read, record
from auditor.document.live import select
from auditor.document.read import AGAIN, json_path, load_plan, read_audit, read_document, read_measurements, read_plan
from auditor.document.write import to_measurements, to_plan
from auditor.errors import PlanError
from tests.documents import Place, places, replaced, without
from tests.unit.report.factory import make_audit

LINE = re.compile(
    r"^it: `\$[^`]*` (is missing|should be .+, is .+?)( \(\d+ more like it\))?\. " + re.escape(AGAIN) + r"\.$"
)
WRONG: tuple[Any, ...] = (None, True, -7, 0.5, "?", [], [0], {}, {"?": 0})
NEEDED = {
    "plan": {("plans",), ("plans", "*", "strategy"), ("plans", "*", "format"), ("plans", "*", "scopes")},
    "audit": {
        ("subject",),
        ("environment",),
        ("budget",),
        ("findings",),
        *(("findings", "*", key) for key in ("rule", "name", "owner", "op", "severity", "message")),
    },
}
MEASURED = {
    *(("nodes", "*", key) for key in ("op", "owner")),
    *(("nodes", "*", fmt, "verdict") for fmt in ("fp16", "bf16")),
    *(("findings", "*", key) for key in ("rule", "name", "owner", "op", "severity", "message")),
    ("format_version",),
    ("plans",),
}
SCOPE = ("plans", "*", "scopes", "*", "precision")


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    """A plan.json with few of everything, no training."""
    found: dict[str, Any] = json.loads(json.dumps(to_plan(make_audit(8))))
    found["plans"] = {name: found["plans"][name] for name in ("autocast_fp16", "cast_bf16")}
    return found


@pytest.fixture(scope="module")
def measured() -> dict[str, Any]:
    """A measurements.json with few of everything, no training."""
    found: dict[str, Any] = json.loads(json.dumps(to_measurements(make_audit(8))))
    found["nodes"], found["findings"] = found["nodes"][:2], found["findings"][:2]
    for node in found["nodes"]:
        node["range"]["exponents"] = {"-3": 1}
    found["plans"] = {"cast_bf16": {"pareto": found["plans"]["cast_bf16"]["pareto"][:1]}}
    return found


def refusal(read: Callable[[Any, str], Any], document: Any) -> str | None:
    """What it is refused with, one line that has a path, what is wrong and what to do; None if it is read."""
    try:
        read(document, "it")
    except PlanError as error:
        said, slug = str(error), error.slug
    else:
        return None
    assert slug == "bad-plan"
    assert LINE.match(said), said
    return said


def starred(place: Place) -> Place:
    """A place with `*` for names of plans and scopes, and for indices."""
    keys = ["*" if isinstance(key, int) else key for key in place]
    for index in (1, 3):
        if keys[0] == "plans" and len(keys) > index:
            keys[index] = "*" if index == 1 or keys[2] == "scopes" else keys[index]
    return tuple(keys)


def test_what_lacks_one_thing_is_read_unless_it_is_needed(document: dict[str, Any]) -> None:
    plan = {*NEEDED["plan"], ("format_version",), SCOPE}
    for place in places(document):
        if isinstance(place[-1], int):
            continue
        changed = without(document, place)
        for reader, needed in ((read_document, plan), (read_audit, plan | NEEDED["audit"])):
            said = refusal(reader, changed)
            assert (said is not None) == (starred(place) in needed), (place, said)
            if said is not None and place != ("format_version",):
                assert f"`{json_path(place)}` is missing" in said
        refusal(record, changed)


def test_measurements_that_lack_one_thing_are_read_unless_it_is_needed(measured: dict[str, Any]) -> None:
    for place in places(measured):
        if not isinstance(place[-1], int):
            said = refusal(read_measurements, without(measured, place))
            assert (said is not None) == (starred(place) in MEASURED), (place, said)


@pytest.mark.parametrize("read_it", [read_document, read_measurements])
def test_what_is_wrong_in_one_place_is_said_with_that_place(
    document: dict[str, Any], measured: dict[str, Any], read_it: Callable[[Any, str], Any]
) -> None:
    document = document if read_it is read_document else measured
    for place in places(document):
        if place[0] == "findings" and place[2:3] == ("evidence",):
            continue  # facts of a rule are of any kind
        said = [refusal(read_it, replaced(document, place, value)) for value in WRONG]
        assert any(said), place
        for line in filter(None, said):
            path = line.split("`")[1]
            assert path.startswith(json_path(place[:1])), (place, line)
            assert path.startswith(json_path(place)) or json_path(place).startswith(path), (place, line)
        for value in WRONG:
            refusal(record, replaced(document, place, value))


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        (("plans", "cast_bf16", "scopes"), 3, "`$.plans.cast_bf16.scopes` should be an object, is 3."),
        (("plans", "cast_bf16", "verified"), 1, "`$.plans.cast_bf16.verified` should be true or false, is 1."),
        (("subject", "parameters"), 2.5, "`$.subject.parameters` should be a whole number, is 2.5."),
        (("environment", "execution"), "guessed", "should be 'native' or 'emulated', is \"guessed\"."),
        (("warnings",), [1, 2, 3], "`$.warnings[0]` should be text, is 1 (2 more like it)."),
        (("format_version",), "1", "`$.format_version` should be 1, is"),
        (
            ("format_version",),
            True,
            "`$.format_version` should be 1, is true.",
        ),
        (("format_version",), 3, "`$.format_version` should be 1, is 3."),
        (("recommendation",), "x", None),
        (("warnings",), "a" * 60, f'is "{"a" * 36}...'),
        (
            ("plans", "cast_bf16", "scopes", "a.b\n"),
            0,
            r'`$.plans.cast_bf16.scopes["a.b\n"]` should be an object, is 0.',
        ),
    ],
)
def test_what_is_said(document: dict[str, Any], place: Place, value: Any, said: str | None) -> None:
    found = refusal(read_document, replaced(document, place, value))
    assert found is None if said is None else said in str(found)


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        (("plans", "cast_bf16", "pareto", 0), [1.0], "`$.plans.cast_bf16.pareto[0]` should be a list of 2, is a list."),
        (
            ("nodes", 0, "fp16", "underflow"),
            2.0,
            "`$.nodes[0].fp16.underflow` should be less than or equal to 1, is 2.0.",
        ),
        (
            ("nodes", 0, "range", "exponents"),
            {"x": 1},
            '`$.nodes[0].range.exponents.x` should be a whole number, is "x".',
        ),
        (("nodes", 1, "findings"), [1, 2, 3], "`$.nodes[1].findings[0]` should be text, is 1 (2 more like it)."),
        (
            ("format_version",),
            None,
            "`$.format_version` should be 1, is null.",
        ),
    ],
)
def test_what_is_said_of_measurements(measured: dict[str, Any], place: Place, value: Any, said: str) -> None:
    assert said in str(refusal(read_measurements, replaced(measured, place, value)))


def test_names_that_are_not_known_matter_where_a_plan_is_applied(document: dict[str, Any]) -> None:
    for key, name, known in (("format", "half", "bf16, fp16"), ("strategy", "magic", "autocast, cast")):
        changed = replaced(document, ("plans", "cast_bf16", key), name)
        said = refusal(read_document, changed)
        assert said is not None
        assert f"`$.plans.cast_bf16.{key}` should be one of {known}" in said
        assert refusal(read_audit, changed) is None


def test_a_plan_in_a_format_of_elsewhere_is_no_reason_to_refuse_the_others(document: dict[str, Any]) -> None:
    changed = replaced(document, ("plans", "cast_bf16", "format"), "e6m9")
    assert refusal(read_document, changed) is None
    assert select(changed, "autocast_fp16")["format"] == "fp16"
    with pytest.raises(PlanError, match="torch has no arithmetic in E6M9"):
        select(changed, "cast_bf16")


@pytest.mark.parametrize("cut", [0, 1, 2, 100, 2000])
def test_a_file_that_ends_early(document: dict[str, Any], tmp_path: Path, cut: int) -> None:
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(document)[:cut], encoding="utf-8")
    for reader in (load_plan, read):
        with pytest.raises(PlanError, match=r"plan\.json is not a plan: .+ Audit the model again") as caught:
            reader(file)
        assert caught.value.slug == "bad-plan"


@pytest.mark.parametrize(
    "content", [b"\xff\xfe", b"{,}", b"[" * 100_000, b"1" * 5000, b'{"a": ' * 3000 + b"1" + b"}" * 3000]
)
def test_files_that_are_no_json(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    file.write_bytes(content)
    with pytest.raises(PlanError) as caught:
        load_plan(file)
    assert caught.value.slug == "bad-plan"
    assert "\n" not in str(caught.value)


def test_objects_in_objects_beyond_pythons_depth(tmp_path: Path) -> None:
    deep: Any = 1
    for _ in range(5000):
        deep = {"a": deep}
    with pytest.raises(PlanError, match="it is nested too deep"):
        read_document({"format_version": 1, "plans": deep}, "it")


def test_paths_that_cannot_be_opened(tmp_path: Path) -> None:
    (tmp_path / "folder" / "plan.json").mkdir(parents=True)
    for path, reason in (
        (tmp_path, "No such file"),
        (tmp_path / "folder", "Is a directory"),
        (tmp_path / "none.json", "No such file"),
    ):
        with pytest.raises(PlanError, match=reason) as caught:
            load_plan(path)
        assert caught.value.slug == "missing-plan"


def test_numbers_that_json_lacks_are_null(document: dict[str, Any], tmp_path: Path) -> None:
    changed = replaced(document, ("plans", "cast_bf16", "predicted_error"), float("nan"))
    assert read_document(changed, "it").plans["cast_bf16"].predicted_error is None
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(changed), encoding="utf-8")
    assert load_plan(file)["plans"]["cast_bf16"]["predicted_error"] is None


def test_a_plan_alone_and_plans_by_name() -> None:
    plan = {"strategy": "cast", "format": "fp16", "scopes": {"": {"precision": "fp16"}}}
    assert read_plan(plan, "it").scopes[""].precision == "fp16"
    assert select({"mine": plan}, "mine") == plan
    for wrong in ({**plan, "format": "half"}, {**plan, "scopes": []}, {"scopes": {}}):
        assert refusal(read_plan, wrong)
    with pytest.raises(PlanError, match=r"the plan 'mine': `\$\.format` should be one of"):
        select({"mine": {**plan, "format": "half"}}, "mine")


def test_an_audit_without_plans_is_compared_but_not_applied(document: dict[str, Any]) -> None:
    empty = replaced(document, ("plans",), {})
    assert refusal(read_audit, empty) is None
    assert "`$.plans` should be an object with a plan" in str(refusal(read_document, empty))
