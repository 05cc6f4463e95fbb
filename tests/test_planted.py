"""Four mistakes on four lines of a Llama: what an audit shows first, and each sentence about them against facts."""

import re

import pytest
import torch

import auditor
from auditor.artefact.strategies import strategy_of
from auditor.document.codec import texts
from auditor.records import Audit, NodeReport
from auditor.report.findings import Cause, causes
from auditor.reporters import REPORTERS
from tests.support.capturing import Function
from tests.support.planted import MISTAKES, REPAIRED, line, llama

AUTOCAST, CAST = "under autocast", "with cast weights"


def audited(layers: int = 3, **planted: float) -> Audit:
    model, inputs = llama(layers, **planted)
    return auditor.audit(model, inputs)


@pytest.fixture(scope="module")
def bad() -> Audit:
    return audited()


@pytest.fixture(scope="module")
def repaired() -> Audit:
    return audited(layers=2, **REPAIRED)


def reports(audit: Audit, cause: Cause) -> list[NodeReport]:
    members = {finding.node for finding in cause.members}
    return [report for report in audit.nodes if report.node.name in members]


def test_its_four_causes_come_first(bad: Audit) -> None:
    found = causes(bad)
    assert {cause.worst.source for cause in found.wanting} == {line(planted) for planted in MISTAKES}
    assert len(found.wanting) == 4
    assert sum(len(cause.members) for cause in found.all) == len(bad.findings)


@pytest.mark.parametrize(
    "planted",
    [pytest.param(name, marks=[pytest.mark.slow] if name != "loud" else []) for name in MISTAKES],
)
def test_each_is_gone_once_it_is_repaired(planted: str) -> None:
    audit = audited(layers=2, **{planted: REPAIRED[planted]})
    others = {line(other) for other in MISTAKES if other != planted}
    assert {cause.worst.source for cause in causes(audit).wanting} <= others
    # A problem of BF16 alone is a note if the plan is FP16.
    assert others <= {one.source for one in audit.findings if one.severity != "info" or one.bearing == "elsewhere"}


def test_plan_json_is_small_for_its_operations(bad: Audit) -> None:
    assert len(bad.plans) == 4
    assert len(texts(bad)["plan.json"].encode()) < 400 * len(bad.nodes)


def test_a_repaired_model_has_nothing_to_fix(repaired: Audit) -> None:
    found = causes(repaired)
    assert found.wanting == ()
    assert found.headline == "nothing to fix: the measurement confirms no finding"
    assert found.notes == ()
    assert all(found.headline[1:] in REPORTERS[n](repaired) for n in ("text", "md", "html"))


def test_every_reporter_has_the_causes_and_no_kind_more(bad: Audit) -> None:
    for name in set(REPORTERS) - {"json"}:
        text = REPORTERS[name](bad)
        assert all(line(planted).removeprefix("planted.py:") in text for planted in MISTAKES), name
    assert "4 problems (4 warnings)" in REPORTERS["text"](bad)


def test_what_inherits_an_overflow_is_in_the_cause_of_it(bad: Audit) -> None:
    (loud,) = (cause for cause in causes(bad).wanting if cause.worst.source == line("loud"))
    assert {finding.op for finding in loud.members} > {"aten.mul.Tensor"}  # the product that reads it, too
    nodes = {report.node.name: report for report in bad.nodes}
    heirs = [report for report in reports(bad, loud) if report.node.source != line("loud")]
    assert {report.node.owner for report in heirs} == {f"layers.{i}.mlp.down_proj" for i in range(3)}
    for report in heirs:
        assert report.errors["fp16"].overflow + report.errors["fp16"].nan > 0
        assert any(nodes[name].errors["fp16"].overflow > 0 for name in report.node.inputs if name in nodes)


def test_what_it_says_of_the_recommended_plan_is_so(bad: Audit) -> None:
    found = causes(bad)
    plan = bad.plans[bad.recommended or ""]
    title = f"BF16 {strategy_of(plan.strategy).title}"
    assert found.about == f"Problems that {title}, the recommended plan, avoids are reported as warnings at most."
    assert (plan.format, plan.is_verified) == ("bf16", True)
    said = {cause.worst.source: cause.plan_effect for cause in found.wanting}
    opening = f"{title}, the recommended plan,"
    assert said[line("eps")] == f"{opening} avoids the problem, which only occurs in FP16 {CAST}."
    assert said[line("masked")] == f"{opening} avoids the problem, which only occurs in FP16 {AUTOCAST} or FP16 {CAST}."
    for name in ("autocast_fp16", "cast_fp16"):
        assert bad.baselines[name].failure is not None  # -1e9 cannot be written in FP16
        assert bad.baselines[name.replace("fp16", "bf16")].finite


def test_how_many_operations_the_plan_keeps_is_what_ran_in_fp32(bad: Audit) -> None:
    (sharp,) = (cause for cause in causes(bad).wanting if cause.worst.source == line("sharp"))
    said = re.search(r"keeps (?:all |these )?(\d+) (?:of these )?operations in FP32", sharp.plan_effect)
    strategy = bad.plans[bad.recommended or ""].strategy
    found = {finding.node for finding in bad.findings if "bf16" in finding.formats}
    exposed = [r for r in reports(bad, sharp) if strategy in r.exposed["bf16"] and r.node.name in found]
    ran = [r.planned for r in exposed]
    assert int(said[1]) == sum(d is not None and "bfloat16" not in (*d.inputs, d.output) for d in ran)


def test_where_no_plan_holds_errors_say_so() -> None:
    masked = Function(lambda x: torch.sin(x.masked_fill(x > 5, -1e9)))  # FP16 holds no such literal, nor nine digits
    audit = auditor.audit(masked, (torch.ones(2, 4),), formats=("fp16",), strategies=("cast",), max_error=1e-9)
    assert not any(p.is_verified and "fp16" in {c.precision for c in p.scopes.values()} for p in audit.plans.values())
    found = causes(audit)
    assert found.about == "No plan uses low precision: severities are the rules' defaults."
    assert found.wanting[0].severity == "error"
    assert found.wanting[0].plan_effect == "No plan uses low precision; this operation is one reason."
