"""What is said of criteria: every sentence on an audit on which it is true, its numbers held against the plan's."""

import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from markupsafe import escape
from torch import Tensor, nn

import auditor
from auditor.records import Audit, CriterionValue, NodeError, Reason, ScopeChoice, Verdict, Verification
from auditor.records.audit import Proposal
from auditor.report.charts import depth_chart
from auditor.report.findings import causes, causes_by_place
from auditor.report.plans import criteria_lines, criterion_commands, limit_line, shown_value
from auditor.report.view import ReportView, next_step
from auditor.reporters import html, text
from tests.support.replaying import Model
from tests.support.subjects import normal, seeded
from tests.unit.report.factory import make_audit


def forward(m: Any, x: Tensor) -> dict[str, Tensor]:
    """Positions in pixels beside logits."""
    seen = torch.relu(m.body(x))
    return {"places": 500 + 100 * m.place(seen), "logits": m.kind(seen)}


@cache
def audited(*criteria: str) -> Audit:
    sizes = {"body": (6, 16), "place": (16, 4), "kind": (16, 5)}
    model = seeded(lambda: Model(forward, **{name: nn.Linear(*size) for name, size in sizes.items()}))
    return auditor.audit(model.eval(), normal(8, 6), device="cpu", criteria=criteria)


ASKED = ("places: max_abs <= 0.5", "logits: kl <= 0.001")


def made(value: float | None, limit: float = 0.5, holds: bool = True, share: float | None = 0.5) -> CriterionValue:
    return CriterionValue("y", "max_abs", "<=", limit, value, share, holds)


@pytest.mark.parametrize(
    ("value", "limit", "said"),
    [
        (0.25, 0.5, "0.25"),
        (0.123456, 0.5, "0.123"),
        (0.50004, 0.5, "0.50004"),
        (0.49999, 0.5, "0.49999"),
        (0.99996, 0.9, "0.99996"),
        (1e-9, 0.0, "1e-09"),
        (1.0, 0.5, "1"),
        (None, 0.5, "missing (no such output)"),
    ],
)
def test_a_value_keeps_to_its_side_of_the_limit(value: float | None, limit: float, said: str) -> None:
    assert shown_value(made(value, limit)) == said
    assert shown_value(replace(made(None), share=None)) == "not finite"


def test_a_line_says_what_the_plan_and_the_format_without_it_came_to() -> None:
    audit = audited(*ASKED)
    for name, plan in audit.plans.items():
        lines = criteria_lines(plan, audit.baselines[name])
        values = plan.verification.criteria
        most = max(values, key=lambda one: one.share)
        for line, one, before in zip(lines, values, audit.baselines[name].criteria, strict=True):
            said = re.fullmatch(
                rf"(Nearest to its limit: )?{one.kind} of {one.output} is (\S+), at most {one.limit:g} is allowed(: limit exceeded)?"
                r"(; without the plan it is (\S+))?",
                line,
            )
            assert said is not None, line
            assert float(said[2]) == pytest.approx(one.value, rel=0.01)
            assert bool(said[3]) is not one.holds
            assert bool(said[1]) is (one is most and one.holds and one.share > 0)
            assert (said[5] is None) is (before.value == one.value)
            assert said[5] is None or float(said[5]) == pytest.approx(before.value, rel=0.01)


def test_what_does_not_hold_is_named() -> None:
    audit = audited(*ASKED)
    plan = audit.plans["cast_bf16"]
    broken = replace(
        plan, verification=replace(plan.verification, holds=False, criteria=(made(0.25), made(0.75, holds=False)))
    )
    shown = next(
        p for p in ReportView(replace(audit, plans={**audit.plans, "cast_bf16": broken})).plans if p.plan is broken
    )
    assert (shown.verdict, shown.detail) == (
        "over budget",
        "max_abs of y is 0.75, at most 0.5 is allowed: limit exceeded",
    )


def test_the_recommendation_and_the_proof_speak_of_the_criteria() -> None:
    audit = audited(*ASKED)
    plan = audit.plans[audit.recommended]
    most = max(plan.verification.criteria, key=lambda one: one.share)
    assert f"measured error {most.share:.2g} within the limit of every criterion" in audit.recommendation
    proof = ReportView(audit).proof
    assert f"every criterion holds. Nearest to its limit: {limit_line(most)}" in proof
    screen = " ".join(text(audit).split())
    assert screen.count(limit_line(most)) == 1  # the section of criteria does not repeat it
    others = [one for one in plan.verification.criteria if one is not most]
    assert all(limit_line(one) in screen for one in others) and others


def test_the_chart_of_relative_errors_has_no_line_at_a_share_of_a_limit() -> None:
    audit = audited(*ASKED)
    assert "budget" not in {kind for kind, _ in depth_chart(audit).paths + depth_chart(audit).legend}
    assert "budget" in {kind for kind, _ in depth_chart(replace(audit, criteria=())).paths}


def test_where_no_plan_holds_the_next_step_is_a_criterion() -> None:
    audit = audited("places: max_abs <= 1e-7")
    assert audit.recommended is None
    said = next_step(replace(audit, findings=(), subject=replace(audit.subject, random_weights=False)), Path("out"))
    assert said == "loosen a criterion: out/report.html lists the value of each under every plan."


# Findings by cause, and what is said beside one: its facts, its plan, what keeping its module in FP32 would cost.


def cause(audit, rule):
    return next(c for c in causes(audit).all if c.worst.rule == rule)


def spoken(audit, *, plan="autocast_fp16", **bearings):
    """The audit with what is said of the findings of each rule under a plan; casting weights runs them all low."""

    def said_of(finding):
        met = dict.fromkeys(finding.formats, ("cast",))
        return replace(finding, plan=plan, bearing=bearings[finding.rule], met=met)

    said = tuple(said_of(f) if f.rule in bearings else f for f in audit.findings)
    return replace(audit, findings=said)


def test_the_headline_counts_causes_by_severity_and_notes():
    audit = make_audit()
    found = causes(audit)
    warnings = [c for c in found.wanting if c.severity == "warning"]
    assert found.headline == f"{len(found.wanting)} problems (1 error, {len(warnings)} warnings)"
    notes = tuple(replace(f, severity="info") for f in audit.findings)
    assert causes(replace(audit, findings=notes)).headline == "nothing to fix, 1 note"  # all about precision
    assert causes(replace(audit, findings=notes[:1])).headline == "nothing to fix, 1 note"
    assert causes(replace(audit, findings=())).headline == "nothing to fix: no rule matched"


def test_a_plan_avoids_a_problem_only_if_it_does_at_every_operation():
    audit = make_audit(60)
    several = next(cause for cause in causes(audit).all if len({f.node for f in cause.members}) > 1)
    for first, other, avoided in (
        ("elsewhere", "elsewhere", True),
        ("elsewhere", "low", False),
        ("kept", "kept", True),
        ("kept", "elsewhere", True),
        ("kept", "low", False),
        ("stops", "kept", False),
    ):
        findings = tuple(
            replace(f, plan="autocast_fp16", bearing=first if f.node == several.members[0].node else other)
            for f in audit.findings
        )
        found = causes(replace(audit, findings=findings)).all
        assert next(cause for cause in found if len(cause.members) == len(several.members)).is_avoided == avoided


@pytest.mark.parametrize(
    ("name", "kind", "said"),
    [
        (
            "autocast_fp16",
            "strategy",
            "is set to FP16. In these modules, autocast runs some operations in FP32 all the same: ",
        ),
        (
            "cast_fp16",
            "inherited",
            "is set to FP16. In these modules, operations that read FP32 values run in FP32 all the same.",
        ),
        ("autocast_fp16", "not-floating", "is set to FP16."),
    ],
)
def test_a_plan_says_which_operations_of_low_modules_run_in_fp32(name: str, kind: str, said: str):
    audit = make_audit(6)
    plan = replace(audit.plans["autocast_fp16"], name=name, strategy=name.partition("_")[0])
    plans = {name: replace(plan, reasons=(Reason(kind, "why", operations=("node_1",)),))}
    assert said in html(replace(audit, plans=plans, recommended=name))


def test_notes_of_one_kind_are_one_note_with_all_its_places():
    audit = make_audit(60)
    said = [replace(finding, severity="info", agrees=None) for finding in audit.findings]
    about_gpus = [replace(one, rule="HWR001", cause=f"{one.source}: HWR001", measurable=False) for one in said]
    also_about_gpus = [replace(one, rule="HWR003", cause=f"{one.source}: HWR003") for one in about_gpus]
    noted = replace(audit, findings=(*said, *about_gpus, *also_about_gpus))
    assert len({(one.cause, one.rule) for one in noted.findings}) > 3
    found = causes(noted)
    assert found.headline == "nothing to fix, 2 notes"
    hardware = next(note for note in found.notes if note.worst.rule == "HWR001")
    assert list(hardware.rules) == ["HWR001", "HWR003"]
    assert len(hardware.members) == 2 * len(said)
    lines = {one.source for one in said}
    assert {hardware.worst.source, *hardware.other_lines} == lines
    assert len(causes_by_place(noted)) > 2  # annotations have one for each place
    page = html(noted)
    fold = page.partition('id="findings-notes"')[2].partition("</section>")[0]
    assert fold.count('<details class="finding info"') == 2
    assert all(str(escape(line)) in fold for line in lines)


def test_a_warning_is_never_joined_with_another():
    audit = make_audit(60)
    warned = replace(audit, findings=tuple(replace(one, severity="warning") for one in audit.findings))
    assert len(causes(warned).wanting) == len(causes_by_place(warned)) > 1


class Residual(nn.Module):
    """A branch beside much larger values. Its norm overflows FP16, or it adds a mask that is beyond FP16."""

    def __init__(self, masked: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.masked = nn.Linear(16, 16), masked

    def forward(self, x: Tensor) -> Tensor:
        if self.masked:
            mask = torch.zeros(16, 16).masked_fill(torch.ones(16, 16).triu(1).bool(), -1e9)
            return x + (self.linear(x / 500) + mask.to(x.dtype)).softmax(-1)
        return x + self.linear(x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6))


@pytest.mark.parametrize("masked", [False, True])
def test_values_that_overflow_without_effect_are_no_refuted_finding(masked: bool):
    inputs = 700 + 100 * torch.randn(16, 16, generator=torch.Generator().manual_seed(0))
    audit = auditor.audit(Residual(masked), (inputs,), formats=("fp16",), strategies=("cast",), device="cpu")
    assert audit.plan is not None
    headline = causes(audit).headline
    overflows = "turn Inf in FP16 (NRM001), which changes the outputs little"
    assert headline.endswith(overflows) is not masked
    assert "CON006" not in headline  # of a mask itself, Inf is what the model wants


def test_notes_that_the_measurement_contradicts_are_counted_apart():
    audit = make_audit(60)
    first, *others = (replace(finding, severity="info") for finding in audit.findings)
    refuted = tuple(replace(finding, agrees=False) for finding in others)
    found = causes(replace(audit, findings=(first, *refuted)))
    assert (len(found.wanting), len(found.notes), found.headline) == (0, 1, "nothing to fix, 1 note")
    assert len(found.unconfirmed) == len(found.all) - 1 > 0
    page = html(replace(audit, findings=(first, *refuted)))
    fold = page.partition('id="findings-unconfirmed"')[2]
    assert fold.count('<details class="finding info"') == len(found.unconfirmed)  # all of them are there
    none = causes(replace(audit, findings=refuted))
    at = "values at model.py:27 turn Inf in FP16 (RNG001)"  # which is seen, and has no effect
    assert none.headline == f"nothing to fix: {at}, which changes the outputs little"
    warned = causes(replace(audit, findings=tuple(replace(one, severity="warning") for one in refuted)))
    places = causes_by_place(replace(audit, findings=refuted))
    assert (len(warned.wanting), warned.unconfirmed) == (len(places), ())  # a warning is never folded away


def test_the_plan_that_severities_are_for_is_named():
    audit = spoken(make_audit(60), RNG001="kept")
    avoids = "; a repair would not make it faster:"
    warned = replace(audit, findings=tuple(replace(one, severity="warning") for one in audit.findings))
    assert avoids not in text(spoken(warned, RNG001="low"))
    assert avoids in text(spoken(warned, RNG001="elsewhere"))
    assert avoids not in text(spoken(audit, RNG001="elsewhere"))  # an error is always to do
    title = "FP16 under autocast"
    assert (
        causes(audit).about == f"Problems that {title}, the recommended plan, avoids are reported as warnings at most."
    )
    alone = replace(audit, recommended=None)
    told = f"Problems that {title}, the fastest plan within the budget, avoids are reported as warnings at most."
    assert causes(alone).about == told
    notes = tuple(replace(finding, severity="info") for finding in audit.findings)
    assert causes(replace(audit, findings=notes)).about == ""  # nothing to explain
    none = replace(
        audit, recommended=None, findings=tuple(replace(f, plan=None, bearing="stops") for f in audit.findings)
    )
    assert causes(none).about == "No plan uses low precision: severities are the rules' defaults."
    assert cause(none, "RNG001").plan_effect == "No plan uses low precision; this operation is one reason."
    assert (causes(make_audit(60)).about, cause(make_audit(60), "RNG001").plan_effect) == ("", "")


def test_a_card_says_what_becomes_of_one_operation():
    opening = "FP16 under autocast, the recommended plan,"
    said = {
        "kept": f"{opening} keeps the operation in FP32.",
        "low": f"{opening} runs the operation on low-precision values, with an error within the limit.",
        "reads": f"{opening} runs the operation in FP32 on low-precision inputs, with an error within the limit.",
        "elsewhere": f"{opening} avoids the problem, which only occurs in FP16 with cast weights.",
    }
    for bearing, sentence in said.items():
        assert cause(spoken(make_audit(60), RNG001=bearing), "RNG001").plan_effect == sentence
    audit = spoken(make_audit(60), RNG001="kept")
    plan = audit.plans["autocast_fp16"]
    wide, owner = ScopeChoice("fp16", fp32_output=("linear",)), cause(audit, "RNG001").worst.owner
    for path, output in ((owner, " (or only the output)"), ("elsewhere", "")):
        changed = replace(plan, scopes={**plan.scopes, path: wide})
        audit = replace(audit, plans={**audit.plans, plan.name: changed})
        assert cause(audit, "RNG001").plan_effect == f"{opening} keeps the operation{output} in FP32."


def test_a_card_says_how_many_operations_become_what():
    audit = spoken(make_audit(), SFT001="kept")
    members = [f.node for f in audit.findings if f.rule == "SFT001"]
    assert cause(audit, "SFT001").plan_effect.endswith(f"keeps these {len(members)} operations in FP32.")
    mixed = {members[0]: "low", members[1]: "elsewhere"}
    findings = tuple(replace(f, bearing=mixed.get(f.node, f.bearing)) for f in audit.findings)
    assert cause(replace(audit, findings=findings), "SFT001").plan_effect == (
        f"FP16 under autocast, the recommended plan, keeps {len(members) - 2} of these operations in FP32; runs 1 of these "
        "operations on low-precision values, with an error within the limit; avoids the problem of 1 of these operations, which could only occur in FP16 with "
        "cast weights or BF16 with cast weights."
    )


def test_findings_of_one_cause_are_one_card_headed_by_a_rule_that_is_borne_out():
    audit = make_audit(60)
    (overflow,) = (f for f in audit.findings if f.rule == "RNG001")
    softmax = [f for f in audit.findings if f.rule == "SFT001"]
    alone = [replace(f, rule="MSR001", formats=("fp16",), agrees=True) for f in softmax]
    together = tuple(replace(f, cause="model.py:1 mul") for f in (*alone, *softmax, overflow))
    (card,) = causes(replace(audit, findings=together)).all
    assert card.worst.rule == "RNG001"
    assert (card.severity, card.operations) == ("error", 1 + len(softmax))
    assert card.size == f"{len(together)} findings: RNG001, SFT001, MSR001"
    noted = tuple(replace(f, severity="info") if f.rule in ("SFT001", "RNG001") else f for f in together)
    (card,) = causes(replace(audit, findings=noted)).all
    assert card.worst.rule == "MSR001"  # a note does not head what is more than one
    refuted = tuple(replace(f, agrees=False, severity="info") if f is overflow else f for f in (*softmax, overflow))
    only = tuple(replace(f, cause="c") for f in refuted)
    assert causes(replace(audit, findings=only)).all[0].worst.rule == "SFT001"


def test_of_findings_that_weigh_the_same_the_one_at_which_the_cause_begins_heads_the_card():
    audit = make_audit()
    softmax = sorted(cause(audit, "SFT001").members, key=lambda f: cause(audit, "SFT001").worst.node != f.node)
    strongest, least = softmax[0], replace(softmax[-1], source="model.py:77", op="aten.mul.Tensor")
    for begins, heads in (
        ("model.py:77 mul", least),
        ("model.py:77 mul: precision", least),
        ("model.py:5 add", strongest),
    ):
        members = tuple(replace(f, cause=begins) for f in (*softmax[:-1], least))
        (card,) = causes(replace(audit, findings=members)).all
        assert (card.worst.node, card.owners[0]) == (heads.node, heads.owner)


# The line that says what to do next: for every outcome one, and doing it does what it says.


HERE = Path("audits/net")


def net() -> nn.Module:
    return seeded(lambda: nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)))


def audited_with(**how: Any) -> Audit:
    options = {"formats": "bf16", "strategies": "cast", "device": "cpu", **how}
    return auditor.audit(net(), torch.randn(16, 8, generator=torch.Generator().manual_seed(1)), **options)


def test_a_budget_that_is_named_is_enough() -> None:
    tight = audited_with(max_error=1e-5)
    assert tight.recommended is None
    said = next_step(replace(tight, findings=()), HERE)
    budget = re.search(r"--max-error (\S+):", said)
    assert budget is not None, said
    found = audited_with(max_error=float(budget[1]))
    assert found.plans[found.recommended].measured_error <= float(budget[1])


def test_a_cause_that_is_named_is_the_first_and_can_be_explained(capsys: pytest.CaptureFixture[str]) -> None:
    audit = make_audit(60, recommended=None)
    said = next_step(audit, HERE)
    code = re.match(r"repair (\w+) at \S+, and audit again; `python -m auditor explain (\w+)`", said)
    assert code is not None, said
    assert code[1] == code[2] in {finding.rule for finding in audit.findings if finding.severity != "info"}


def test_random_weights_come_first_where_a_checkpoint_would_load() -> None:
    audit = make_audit(20)
    random = replace(audit, subject=replace(audit.subject, random_weights=True))
    assert "--weights FILE" in next_step(random, HERE)
    assert "--weights" not in next_step(replace(random, parameters=0), HERE)
    assert "--weights" not in next_step(audit, HERE)


def test_training_that_can_be_low_has_a_loop_in_the_report() -> None:
    data = [(torch.randn(8, 8), torch.randn(8, 4)) for _ in range(2)]
    found = auditor.audit(
        net(), data, mode="training", loss_fn=nn.MSELoss(), formats="bf16", strategies="autocast", device="cpu"
    )
    assert found.training.format == "bf16"
    assert next_step(found, HERE) == "train with the loop in audits/net/report.html, section Training."
    assert "train_step(model, scaler" in html(found)


@pytest.mark.parametrize(
    ("change", "verdict"),
    [
        ({}, "verified"),
        ({"verification": None}, "not run"),
        ({"verification": Verification(0.02)}, "over budget"),
        ({"verification": Verification(0.002)}, "not verified"),
        ({"verification": Verification(None, False, "audited", "native", "KeyError: x")}, "failed"),
        ({"verification": Verification(None, False, "audited", "native")}, "non-finite"),
        ({"verification": Verification(0.001, True, "audited", "native", with_gradients=0.02)}, "over budget"),
    ],
)
def test_plan_verdicts(change, verdict):
    audit = make_audit()
    plans = {**audit.plans, "autocast_fp16": replace(audit.plans["autocast_fp16"], **change)}
    chosen = ReportView(replace(audit, plans=plans)).chosen
    assert chosen.verdict == verdict


def test_cautions_are_sentences() -> None:
    audit = make_audit(20)
    cautioned = replace(audit, warnings=("the model is stored in bfloat16: the reference is the same values in FP32",))
    assert "The model is stored in bfloat16: the reference is the same values in FP32." in ReportView(cautioned).limits
    assert all(limit[0].isupper() and limit.endswith(".") for limit in ReportView(cautioned).limits)


def test_what_was_not_tested_is_not_said_to_be_neither() -> None:
    audit = make_audit(20, formats=("bf16",))
    safe, untested = Verdict("safe", ""), Verdict("untested", "it computes in float64")
    for number, words in (
        (0, "BF16: none of the 20 operations is unsafe or sensitive."),
        (1, "BF16: none of the 19 operations tested is unsafe or sensitive; 1 was not tested."),
        (3, "BF16: none of the 17 operations tested is unsafe or sensitive; 3 were not tested."),
        (19, "BF16: the only operation tested is neither unsafe nor sensitive; 19 were not tested."),
        (20, "BF16 was not tested on any operation."),
    ):
        verdicts = [untested] * number + [safe] * (20 - number)
        nodes = tuple(replace(n, verdicts={"bf16": v}) for n, v in zip(audit.nodes, verdicts, strict=True))
        assert [tally.sentence for tally in ReportView(replace(audit, nodes=nodes)).tallies] == [words]


def test_what_limits_a_format_names_missing_kernels_beside_precision() -> None:
    audit = make_audit(20, formats=("bf16",))
    first, second, *others = audit.nodes
    rounded = replace(first, verdicts={"bf16": Verdict("sensitive", "alone it takes half", "precision")})
    missing = replace(
        second,
        verdicts={"bf16": Verdict("unsafe", "no kernel")},
        errors={"bf16": NodeError(unsupported="stft has no bfloat16 kernel")},
        exposed={"bf16": ("cast",)},
    )
    safe = [replace(node, verdicts={"bf16": Verdict("safe", "")}) for node in others]
    mixed = replace(missing, errors={"bf16": NodeError(unsupported="bmm got float32 and bfloat16 together")})
    for nodes, limit in (
        ((mixed, *safe), "operations that raise errors"),
        ((missing, *safe), "missing kernels"),
        ((rounded, missing, *safe), "rounding and missing kernels"),
    ):
        seen = ReportView(replace(audit, nodes=nodes))
        assert seen.tallies[0].limit == limit
        assert any(
            f"1 unsafe (only with cast weights) and {len(nodes) - len(safe) - 1} sensitive" in said
            for said in (tally.sentence for tally in seen.tallies)
        )


@pytest.mark.parametrize(
    ("command", "again"),
    [
        ("python -m auditor net.py", "python -m auditor net.py --criterion 'logits: kl <= 0.001'"),
        ("auditor.audit(model, x)", "auditor.audit(model, x, criteria='logits: kl <= 0.001')"),
    ],
)
def test_a_suggested_criterion_comes_with_the_command_to_copy(command: str, again: str) -> None:
    offers = (
        Proposal("logits", "logits: kl <= 0.001", "the last operation is a linear layer"),
        Proposal("mask", "mask: flips <= 0.001", "it is boolean", holds=True),  # applied already
    )
    audit = replace(make_audit(20), command=command, proposals=offers)
    assert [code.text for code in criterion_commands(audit)] == [again]
    assert f"<code>{escape(again)}</code>" in html(audit)


def test_where_an_output_is_lost_there_is_something_to_decide() -> None:
    run = Verification(0.001, holds=True, apart={"a": 0.3, "b": 0.02})
    chosen = "cast_fp16"
    audit = make_audit(4, recommended=chosen)
    plans = {**audit.plans, chosen: replace(audit.plans[chosen], verification=run)}
    offers = tuple(Proposal(name, f"{name}: rel_l2 <= 0.01", "its error") for name in ("a", "b"))
    lost = replace(audit, plans=plans, findings=(), proposals=offers, max_error=0.01)
    assert causes(lost).headline == "no finding, but output `a` alone exceeds the error budget"
