"""Whatever a plan.json holds, it is read, or refused in one line with a path and a piece of advice."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from auditor.artefact.applying import apply_plan, is_wrapped
from auditor.document.codec import merge, to_measurements, to_plan
from auditor.document.live import apply, patched_source, read_plans, select
from auditor.document.read import AGAIN, applicable, audit_of, json_path, load, load_plan
from auditor.errors import PlanError
from auditor.records import Origin, Subject
from tests.support import documents
from tests.support.documents import Place, places, replaced, without
from tests.support.patching import AUTOCAST, CAST, Net
from tests.support.refusing import refused
from tests.support.subjects import seeded, subject_of
from tests.support.thinned import thinned
from tests.unit.report.factory import make_audit

LINE = re.compile(
    r"^it: `\$[^`]*` (is missing|should be .+, is .+?)( \(\d+ more like it\))?\. " + re.escape(AGAIN) + r"\.$"
)
WRONG: tuple[Any, ...] = (None, True, -7, 0.5, "?", [], [0], {}, {"?": 0})


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
    found["nodes"] = found["nodes"][:2]
    found["plans"] = {name: found["plans"][name] for name in ("autocast_fp16", "cast_bf16")}
    for node in found["nodes"]:
        node["range"]["exponents"] = {"-3": 1}
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


def test_what_lacks_one_thing_is_read_or_refused_in_place(document: dict[str, Any], measured: dict[str, Any]) -> None:
    found = merge(document, measured)
    known = [("format_version",), ("plans", document["recommended"])]
    for place in places(found):
        said = None if isinstance(place[-1], int) else refusal(audit_of, without(found, place))
        assert said is None or f"`{json_path(place)}` is missing" in said or place in known


@pytest.mark.parametrize("wrong", thinned((WRONG[start::3],) for start in range(3)))
def test_what_is_wrong_in_one_place_is_said_with_that_place(
    wrong: tuple[Any, ...], document: dict[str, Any], measured: dict[str, Any]
) -> None:
    found = merge(document, measured)
    for place in places(found):
        if place[0] in ("findings", "plan") and (len(place) == 1 or "evidence" in place):
            continue  # facts of a rule are of any kind
        said = [refusal(audit_of, replaced(found, place, value)) for value in wrong]
        assert any(said) or place == ("plan",), place
        for line in filter(None, said):
            path = line.split("`")[1]
            assert path.startswith(json_path(place[:1])) or path.endswith(".name") or path == "$.recommended", line


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        (("plans", "cast_bf16", "scopes"), 3, "`$.plans.cast_bf16.scopes` should be an object, is 3."),
        (
            ("plans", "cast_bf16", "verification", "holds"),
            1,
            "`$.plans.cast_bf16.verification.holds` should be true or false, is 1.",
        ),
        (("parameters",), 2.5, "`$.parameters` should be a whole number, is 2.5."),
        (("warnings",), [1, 2, 3], "`$.warnings[0]` should be text, is 1 (2 more like it)."),
        (("format_version",), True, "`$.format_version` should be 1, is true."),
        (("warnings",), "a" * 60, f'is "{"a" * 36}...'),
        (
            ("plans", "cast_bf16", "scopes", "a.b\n"),
            0,
            r'`$.plans.cast_bf16.scopes["a.b\n"]` should be an object, is 0.',
        ),
    ],
)
def test_what_is_said(document: dict[str, Any], place: Place, value: Any, said: str | None) -> None:
    found = refusal(applicable, replaced(document, place, value))
    assert found is None if said is None else said in str(found)


def test_names_that_are_not_known_matter_where_a_plan_is_applied(document: dict[str, Any]) -> None:
    for key, name, known in (("format", "half", "bf16, fp16"), ("strategy", "magic", "autocast, cast")):
        changed = replaced(document, ("plans", "cast_bf16", key), name)
        said = refusal(applicable, changed)
        assert f"`$.plans.cast_bf16.{key}` should be one of {known}" in said
        assert refusal(audit_of, changed) is None


def test_an_audit_whose_plan_has_an_unknown_strategy_is_not_loaded(document: dict[str, Any], tmp_path: Path) -> None:
    changed = replaced(document, ("plans", "cast_bf16", "strategy"), "magic")
    (tmp_path / "plan.json").write_text(json.dumps(changed), encoding="utf-8")
    with refused(PlanError, "bad-plan", match=r"`\$\.plans\.cast_bf16\.strategy` should be one of autocast, cast"):
        load(tmp_path)


@pytest.mark.parametrize(
    "content", [b"", b"{", b'{"format_version": 1', b"\xff\xfe", b"[" * 100_000, b"1" * 5000, b'{"a": ' * 3000 + b"1"]
)
def test_a_file_that_is_no_json(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_bytes(content)
    for reader in (load_plan, load):
        with refused(PlanError, "bad-plan", match=r"plan\.json is not a plan: [^\n]+ Audit the model again"):
            reader(tmp_path)


def test_paths_that_cannot_be_opened(tmp_path: Path) -> None:
    (tmp_path / "folder" / "plan.json").mkdir(parents=True)
    for path, reason in ((tmp_path, "No such file"), (tmp_path / "folder", "Is a directory")):
        with refused(PlanError, "missing-plan", match=reason):
            load_plan(path)


# A plan in any of its forms is applied to a model in hand, or refused in one sentence.


@pytest.mark.parametrize("wrap", [torch.nn.DataParallel, torch.compile])
def test_a_wrapped_model_follows_the_plan_of_the_one_inside(wrap: Any) -> None:
    inner = seeded(Net)
    model = wrap(inner)
    assert apply_plan(model, AUTOCAST) is model
    paths = [path for path, module in inner.named_modules() if is_wrapped(module)]
    assert paths == [path for path, module in apply_plan(seeded(Net), AUTOCAST).named_modules() if is_wrapped(module)]


def small_document(parameters: int) -> dict[str, Any]:
    plans = {"autocast_bf16": AUTOCAST, "cast_bf16": CAST}
    return documents.document(plans, "autocast_bf16", parameters=parameters)


def test_a_plan_is_chosen_by_name_for_the_model_that_it_was_made_for() -> None:
    count = sum(p.numel() for p in seeded(Net).parameters())
    assert apply(seeded(Net), small_document(count), "cast_bf16").first.weight.dtype is torch.bfloat16
    assert apply(seeded(Net), small_document(count)).first.weight.dtype is torch.float32
    for told, name, slug in (
        (small_document(count), "cast_fp16", "no-such-plan"),
        (small_document(count + 1), None, "plan-mismatch"),
    ):
        with refused(PlanError, slug):
            apply(seeded(Net), told, name)


def test_plans_that_cannot_be_run_are_not_offered() -> None:
    told = documents.document({"cast_bf16": CAST, "cast_fp8_e4m3": CAST | {"format": "fp8_e4m3"}})
    with refused(PlanError, "no-such-plan", match=r"no plan is recommended; choose one of cast_bf16\."):
        apply(seeded(Net), told)
    del told["plans"]["cast_bf16"]
    with refused(PlanError, "no-arithmetic", match=r"none can be run: torch cannot compute in FP8 E4M3\."):
        apply(seeded(Net), told)


def test_an_audit_stands_for_the_plan_that_it_recommends() -> None:
    found = make_audit(8)
    assert select(found, None) == (found, found.plans[found.recommended])
    other = next(name for name in sorted(found.plans) if name != found.recommended)
    assert select(found, other) == (found, found.plans[other])
    assert select(found.plans, other) == (None, found.plans[other])


def test_strategy_format_and_scopes_are_enough_of_a_plan() -> None:
    assert select(CAST, None)[1].scopes[""].precision == "bf16"
    with pytest.raises(PlanError, match=r"the plan: `\$\.format` should be one of"):
        select({**CAST, "format": "half"}, None)


def subject(tmp_path: Path) -> Subject:
    origin = Origin(str(tmp_path / "model.py"), None, "Net", "class")
    return replace(subject_of(seeded(Net), torch.ones(1, 4)), origin=origin)


def test_plans_that_run_are_written_without_what_was_measured(tmp_path: Path) -> None:
    parameters = sum(parameter.numel() for parameter in Net().parameters())
    given = {
        "cast_bf16": CAST | {"verification": {"measured_error": 0.1, "holds": True}},
        "autocast_bf16": AUTOCAST,
        "cast_fp8": CAST | {"format": "fp8_e4m3"},
    }
    (tmp_path / "plan.json").write_text(json.dumps(documents.document(given, "cast_bf16", parameters=parameters)))
    audit, plans, name = read_plans(tmp_path / "plan.json", None)
    assert (audit.recommended, name, set(plans)) == ("cast_bf16", "cast_bf16", {"cast_bf16", "autocast_bf16"})
    assert (plans[name].measured_error, plans[name].is_verified) == (None, False)
    model = subject(tmp_path)
    text = patched_source(model, audit, plans, name, tmp_path)
    compile(text, "patched_model.py", "exec")
    assert "autocast_bf16" in text and "cast_bf16" in text
    # what one plan rounds, the next may want in FP32
    assert {parameter.dtype for parameter in model.model.parameters()} == {torch.float32}
