"""A plan in any of its forms is applied to a model in hand, or refused in one sentence."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from auditor.artefact.applying import apply_plan, is_wrapped
from auditor.document.live import apply, patched_source, read_plans, select
from auditor.errors import PlanError
from auditor.records import Origin, Subject
from tests.support import documents
from tests.support.patching import AUTOCAST, CAST, Net
from tests.support.refusing import refused
from tests.support.subjects import seeded, subject_of
from tests.unit.report.factory import make_audit


@pytest.mark.parametrize("wrap", [torch.nn.DataParallel, torch.compile])
def test_a_wrapped_model_follows_the_plan_of_the_one_inside(wrap: Any) -> None:
    inner = seeded(Net)
    model = wrap(inner)
    assert apply_plan(model, AUTOCAST) is model
    paths = [path for path, module in inner.named_modules() if is_wrapped(module)]
    assert paths == [path for path, module in apply_plan(seeded(Net), AUTOCAST).named_modules() if is_wrapped(module)]


def document(parameters: int) -> dict[str, Any]:
    plans = {"autocast_bf16": AUTOCAST, "cast_bf16": CAST}
    return documents.document(plans, "autocast_bf16", parameters=parameters)


def test_a_plan_is_chosen_by_name_for_the_model_that_it_was_made_for() -> None:
    count = sum(p.numel() for p in seeded(Net).parameters())
    assert apply(seeded(Net), document(count), "cast_bf16").first.weight.dtype is torch.bfloat16
    assert apply(seeded(Net), document(count)).first.weight.dtype is torch.float32
    for told, name, slug in (
        (document(count), "cast_fp16", "no-such-plan"),
        (document(count + 1), None, "plan-mismatch"),
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
