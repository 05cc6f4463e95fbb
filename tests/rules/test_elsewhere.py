"""The code of an advice helps in models other than the rule's example, under autocast and with cast weights."""

import pytest
from torch import nn

from auditor.rulebook.findings import classify
from auditor.rulebook.load import load_rules
from auditor.rulebook.rule import Rule
from tests.rules.elsewhere import ELSEWHERE, Elsewhere, Surrounded, as_advised, as_written
from tests.rules.test_repairs import BUDGET, USES, code_of, error, formats, low, outputs
from tests.support.capturing import captured

RULES = {rule.code: rule for rule in load_rules()}
MODELS = [
    pytest.param(RULES[code], model, id=f"{code}-{number}")
    for code, models in ELSEWHERE.items()
    for number, model in enumerate(models)
]


def of_advice(rule: Rule, model: Elsewhere) -> nn.Module:
    return Surrounded(as_advised("\n".join(code_of(rule.advice))), model).eval()


def as_reported(model: Elsewhere) -> tuple[nn.Module, tuple]:
    return Surrounded(as_written, model).eval(), tuple(model.inputs.values())


@pytest.mark.parametrize(("rule", "model"), MODELS)
def test_the_rule_reports_the_model(rule: Rule, model: Elsewhere) -> None:
    broken, inputs = as_reported(model)
    seen = captured(broken, *inputs)
    assert rule.code in {one.rule for one in classify(seen.capture, seen.facts, tuple(RULES.values()))}


@pytest.mark.parametrize(("rule", "model"), MODELS)
def test_the_advice_keeps_fp32_until_values_are_small(rule: Rule, model: Elsewhere) -> None:
    (broken, inputs), fixed = as_reported(model), of_advice(rule, model)
    truth = outputs(broken, inputs)
    assert error(truth, outputs(fixed, inputs)) <= 1e-3
    cases = [(fmt, use) for fmt in formats(rule) for use in USES]
    before = {case: error(truth, low(broken, inputs, *case)) for case in cases}
    after = {case: error(truth, low(fixed, inputs, *case)) for case in cases}
    assert any(not found <= BUDGET for found in before.values())
    assert {case: found for case, found in after.items() if not found <= BUDGET} == {}


def test_every_advice_that_keeps_values_in_fp32_is_followed_in_three_models() -> None:
    """Those whose code leaves a place for the operations of the reader's model."""
    apart = {"COL001", "SFT001"}  # of a group of ranks; or about rounding that seldom matters
    apart |= {
        code for code, rule in RULES.items() if rule.family in ("measured", "inputs")
    }  # they have tests of their own
    told = {code for code, rule in RULES.items() if "until_small" in rule.advice}
    assert told - apart == {code for code in ELSEWHERE if code in told}
    assert all(len(models) >= 3 for models in ELSEWHERE.values())
