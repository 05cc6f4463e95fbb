"""Rules about schemes below 16 bits: their examples, what the advice changes, and layers where the measurement decides otherwise."""

from collections.abc import Sequence
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from auditor import audit
from auditor.measure.layers import QuantizedModel
from auditor.records import Finding
from auditor.records.audit import Audit
from auditor.reporters import html, text
from auditor.rulebook.findings import classify
from auditor.rulebook.load import load_rules
from auditor.rulebook.rule import Rule
from tests.rules.examples import example
from tests.support.capturing import captured
from tests.support.subjects import normal, seeded

RULES = {rule.code: rule for rule in load_rules() if rule.family == "quantization"}


class Example(NamedTuple):
    """How a rule's example is audited. named: layers that the rule must name, and no others; left_out: by its advice, if
    there are more."""

    scheme: str
    budget: float
    named: set[str]
    left_out: frozenset[str] = frozenset()


EXAMPLES = {
    "QNT001": Example("int8", 0.02, {"1"}),
    "QNT002": Example("nvfp4", 0.15, {"0", "4"}),
    "QNT003": Example("int4", 0.1, {"0"}),
    "QNT004": Example("int8", 0.02, {"down"}),
    "QNT005": Example("nvfp4", 0.2, {"k"}, frozenset({"q", "k", "v"})),
    "QNT006": Example("int8", 0.012, {"0", "2"}),
    "QNT007": Example("int8_tensor", 0.03, {"0"}),
}


def audited(model: nn.Module, inputs: Sequence[Tensor], formats: str, budget: float) -> Audit:
    return audit(model, tuple(inputs), formats=formats, max_error=budget, strategies="cast", quick=True)


def of(code: str, found: Audit) -> list[Finding]:
    return [one for one in found.findings if one.rule == code]


def joint_error(model: nn.Module, inputs: Sequence[Tensor], layers: dict[str, str]) -> float:
    with torch.no_grad():
        reference = model(*inputs)
        with QuantizedModel(model).under(layers):
            return float((model(*inputs) - reference).norm() / reference.norm())


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_an_example_is_named_and_confirmed_by_the_measurement(rule: Rule) -> None:
    scheme, budget, named, _ = EXAMPLES[rule.code]
    found = audited(*example(rule), scheme, budget)
    assert {one.owner for one in of(rule.code, found)} == named
    assert {(one.agrees, one.formats) for one in of(rule.code, found)} == {(True, (scheme,))}
    flagged = {x.owner for x in found.quantization if x.verdict.verdict in ("unsafe", "sensitive")}
    assert named <= flagged


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_without_the_named_layers_the_others_are_within_the_budget(rule: Rule) -> None:
    scheme, budget, named, left_out = EXAMPLES[rule.code]
    model, inputs = example(rule)
    layers = {
        name: scheme for name, x in model.named_modules() if hasattr(x, "weight") and not isinstance(x, nn.LayerNorm)
    }
    assert joint_error(model, inputs, layers) > budget
    assert joint_error(model, inputs, layers | dict.fromkeys(left_out or named, "")) <= budget


@pytest.mark.parametrize("rule", [rule for rule in RULES.values() if rule.example.fixed], ids=lambda rule: rule.code)
def test_the_repaired_code_is_the_same_function_within_the_budget_and_not_named(rule: Rule) -> None:
    scheme, budget, named, _ = EXAMPLES[rule.code]
    (broken, inputs), (fixed, _) = example(rule), example(rule, fixed=True)
    torch.testing.assert_close(fixed(*inputs), broken(*inputs), rtol=1e-4, atol=1e-5)
    assert joint_error(broken, inputs, dict.fromkeys(named, scheme)) > budget
    assert joint_error(fixed, inputs, dict.fromkeys(named, scheme)) <= budget
    assert of(rule.code, audited(fixed, inputs, scheme, budget)) == []


def test_what_the_measurement_contradicts_is_not_confirmed_and_no_warning(tmp_path) -> None:
    found = audited(*example(RULES["QNT001"]), "int8,int8_weights", 100.0)
    (one,) = of("QNT001", found)  # with weights alone, no scale has outlier channels
    assert (one.formats, one.agrees, one.severity) == (("int8",), False, "info")
    assert {x.verdict.verdict for x in found.quantization} == {"safe"}
    assert "QNT001 not confirmed" in html(found)
    assert " confirmed" not in text(found)  # the terminal names rules of layers that are not safe


def test_each_scheme_is_confirmed_by_its_own_measurement() -> None:
    model, inputs = example(RULES["QNT006"])
    found = of("QNT006", audited(model, inputs, "int8,int8_weights", 0.02))
    assert {(one.owner, one.formats[0]): one.agrees for one in found} == {("0", "int8"): True, ("2", "int8"): True}


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_without_schemes_no_rule_about_them_is_applied(rule: Rule) -> None:
    model, inputs = example(rule)
    toy = captured(model, *inputs)
    assert not {one.rule for one in classify(toy.capture, toy.facts, load_rules())} & {*RULES}


class Attention(nn.Module):
    """Attention by hand, with keys that a norm and a rotation follow; then a classifier with a softmax."""

    def __init__(self, *, fused: bool) -> None:
        super().__init__()
        self.fused, self.qkv = fused, nn.Linear(32, 96)
        self.q, self.k, self.v, self.head = (nn.Linear(32, 32) for _ in range(4))
        self.norm = nn.LayerNorm(32)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1) if self.fused else (self.q(x), self.k(x), self.v(x))
        k = self.norm(k)
        k = k * 0.6 + torch.cat((-k[..., 16:], k[..., :16]), -1) * 0.8
        scores = (q @ k.transpose(-1, -2)) / 6 + torch.zeros(8, 8)
        return self.head(scores.softmax(-1) @ v).softmax(-1)


@pytest.mark.parametrize(("fused", "named"), [(True, {"qkv"}), (False, {"k"})])
def test_keys_are_followed_through_norms_and_rotations(fused: bool, named: set[str]) -> None:
    found = audited(seeded(lambda: Attention(fused=fused)), (normal(2, 8, 32),), "int8", 0.001)
    assert {one.owner for one in of("QNT005", found)} == named


def test_a_product_without_outliers_or_without_a_gate_is_no_gated_product() -> None:
    rule = RULES["QNT004"]
    model, inputs = example(rule, fixed=True)
    assert of("QNT004", audited(model, inputs, "int8", 1e-4)) == []
    model, inputs = example(RULES["QNT001"])  # outliers, and no gate
    assert of("QNT004", audited(model, inputs, "int8", 1e-4)) == []
    assert of("QNT001", audited(*example(rule), "int8", 0.02)) == []  # superseded
