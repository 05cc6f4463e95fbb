"""Every sentence that a rule prints: its numbers against a run of the model, what it claims against the operation run low."""

from __future__ import annotations

import pytest
from torch import Tensor, nn

from auditor.judge.classify import classify
from auditor.rulebook import Rule, load_rules
from auditor.rulebook.message import facts_shown
from tests.capturing import captured
from tests.corpus.case import Case as Failure
from tests.corpus.catalogue import CASES as CORPUS
from tests.rules.case import Case
from tests.rules.claims import CLAIMS
from tests.rules.examples import example
from tests.rules.recorded import call_of, recorded
from tests.rules.sentences import FIELDS, TEMPLATES, Seen, reading
from tests.rules.test_rules import CASES

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


@pytest.mark.parametrize("rule", PRINTED, ids=lambda rule: rule.code)
def test_what_it_claims_happens_where_the_operation_runs_low(rule: Rule) -> None:
    model, inputs = example(rule)
    (seen, *_) = (seen for seen in found(model, inputs) if seen.finding.rule == rule.code)
    CLAIMS[rule.code](seen, model, inputs)


def test_every_rule_has_its_claim_checked() -> None:
    assert set(CLAIMS) == {rule.code for rule in PRINTED}


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
