"""Every sentence that a rule prints: its numbers and words against a run of the model."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import auditor
from auditor.numerics.formats import label
from auditor.rulebook.findings import classify
from auditor.rulebook.load import load_rules
from auditor.rulebook.rule import Rule, facts_shown
from tests.corpus.case import Case as Failure
from tests.corpus.catalogue import CASES as CORPUS
from tests.rules.case import Case
from tests.rules.examples import example
from tests.rules.recorded import LOW, call_of, recorded
from tests.rules.sentences import FIELDS, TEMPLATES, Seen, reading
from tests.rules.test_rules import CASES
from tests.support.capturing import Function, captured

RULES = load_rules()
TEMPLATES.update({rule.code: rule.message for rule in RULES})
PRINTED = [rule for rule in RULES if rule.family not in ("measured", "settings")]
"""What the others print comes from verdicts and from pyproject.toml, and is held against those."""


def found(model: nn.Module, inputs: tuple[Tensor, ...]) -> list[Seen]:
    """Every finding on a model, with the calls it speaks of."""
    toy = captured(model, *inputs)
    run = recorded(model, inputs)
    low = {use: recorded(model, inputs, use) for use in ("autocast", "cast")}
    every = []
    for finding in classify(toy.capture, toy.facts, PRINTED):
        call = call_of(finding, toy.capture, run)
        assert call is not None, finding.op
        every.append(Seen(finding, call, run, {use: call_of(finding, toy.capture, low[use]) for use in low}))
    return every


@pytest.mark.parametrize("rule", PRINTED, ids=lambda rule: rule.code)
def test_its_numbers_and_words_are_those_of_a_run_of_its_example(rule: Rule) -> None:
    every = found(*example(rule))
    assert rule.code in {seen.finding.rule for seen in every}
    for seen in every:
        assert seen.finding.message == reading(seen)


def test_what_the_measurement_finds_is_its_verdict_and_its_number_that_of_a_run() -> None:
    x = torch.linspace(1000, 3000, 16)
    audit = auditor.audit(Function(torch.cos), (x,), formats=("fp16", "bf16", "fp8_e4m3"))
    found = {finding.formats: finding for finding in audit.findings if finding.rule.startswith("MSR")}
    assert {formats: finding.rule for formats, finding in found.items()} == {
        ("fp16",): "MSR001",
        ("bf16",): "MSR002",
        ("fp8_e4m3",): "MSR003",
    }
    (report,) = audit.nodes
    for (fmt,), finding in found.items():
        verdict = report.verdicts[fmt]
        assert verdict.verdict == "unsafe"
        assert finding.message == f"the measurement finds cos unsafe in {label(fmt)}: {verdict.reason}"
    for fmt, dtype in LOW.items():
        moved = float((x.to(dtype).cos().float() - x.cos()).norm() / x.cos().norm())
        assert f" {moved:.2g}" in found[(fmt,)].message


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in CASES if case.fires], ids=lambda case: case.name)
def test_they_are_on_every_other_model_of_these_tests(case: Case) -> None:
    for seen in found(case.model().eval(), case.inputs):
        assert seen.finding.message == reading(seen)


def test_every_field_of_every_message_has_a_way_to_be_checked() -> None:
    shown = {name for rule in PRINTED for name in facts_shown(rule.message)}
    assert shown <= set(FIELDS)
    assert set(FIELDS) <= shown, "these are checked, and shown nowhere"


@pytest.mark.slow
@pytest.mark.parametrize("case", CORPUS, ids=lambda case: case.name)
def test_they_are_on_the_failures_that_users_met(case: Failure) -> None:
    for build in (case.build, case.twin):
        model, inputs = build()
        for seen in found(model.eval(), inputs):
            assert seen.finding.message == reading(seen)
