"""Every shipped rule fires where it must, node by node, and is silent where it must not fire; so do the example in each rule
file and the repaired one; collectives, and the failures of the corpus."""

import re
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn

from auditor.asked import Command, command_of
from auditor.loading import from_object
from auditor.measure.measure import measure
from auditor.numerics.operations import operation
from auditor.records import Finding
from auditor.rulebook.facts import EACH
from auditor.rulebook.findings import apply_selection, classify
from auditor.rulebook.gather import gather
from auditor.rulebook.load import load_rules
from auditor.rulebook.rule import Rule
from benchmarks.agreement import Specimen, found_in
from tests.corpus.case import Case
from tests.corpus.catalogue import CASES
from tests.rules import cases, more_cases
from tests.rules.cases import Case as RuleCase
from tests.rules.examples import Side, example
from tests.support.capturing import Function, Seen, captured
from tests.support.findings import finding

RULES = load_rules()
RULE_CASES = (*cases.CASES, *more_cases.CASES)
APART = ("linalg", "recurrent", "dtypes")
"""Families with operations that can not even be traced in half precision; others would lose that trace with them."""
GROUPS = {
    **{name: [rule for rule in RULES if rule.family == name] for name in APART},
    "others": [
        rule
        for rule in RULES
        if rule.family not in (*APART, "measured", "settings", "casts", "quantization", "inputs", "runs", "compiled")
    ],
}


@cache
def fired(group: str, *, fixed: bool) -> dict[str, set[str]]:
    """Codes that fire on each rule's example; captured as one model, which takes a tenth of the time."""
    parts: list[tuple[str, nn.Module, int]] = []
    inputs = []
    rules = [rule for rule in GROUPS[group] if not fixed or (rule.example and rule.example.fixed)]
    for rule in rules:
        model, tensors = example(rule, fixed=fixed)
        parts.append((rule.code, model, len(tensors)))
        inputs += tensors
    toy = captured(Side(parts), *inputs)
    found: dict[str, set[str]] = {rule.code: set() for rule in rules}
    for one in classify(toy.capture, toy.facts, RULES):
        found[one.owner.partition(".")[0]].add(one.rule)
    return found


@pytest.mark.parametrize("group", GROUPS)
def test_every_example_fires_its_rule(group: str) -> None:
    found = fired(group, fixed=False)
    assert [code for code, codes in found.items() if code not in codes] == []


@pytest.mark.parametrize("group", GROUPS)
def test_a_repaired_example_does_not_fire_its_rule_and_has_less_to_say(group: str) -> None:
    before, after = fired(group, fixed=False), fired(group, fixed=True)
    assert [code for code, codes in after.items() if code in codes] == []
    assert [code for code, codes in after.items() if len(codes) > len(before[code])] == []


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.code)
def test_a_rule_that_warns_shows_a_repair(rule: Rule) -> None:
    assert rule.example.fixed or rule.severity == "info" or rule.family == "measured"


def test_the_examples_of_measured_rules_are_found_unsafe_and_foreseen_by_no_other() -> None:
    for rule in RULES:
        if rule.family == "measured" and EACH not in rule.formats:
            found = found_in(Specimen(rule.code, lambda rule=rule: from_object(*example(rule)), failing=True), RULES)
            assert {(one.rule, one.agrees) for one in found} == {("MSR001", True), ("MSR002", True)}


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("HWR001", "this 8 x 10 x 100 matrix product has widths that are not multiples of 8 (10 and 100)"),
        ("HWR001", "padding adds 66% to the work"),
        ("ACT005", "the result of linear reaches 2e+04 on the calibration inputs: after 1.7 more doublings FP16 overflows"),
        ("BND003", "with cast weights (not under autocast)"),
        ("RNN003", "one of 20 calls of this cell: under autocast and with cast weights"),
        ("POS001", "rotary angles up to 905 are computed in low precision before sin and cos. Adjacent numbers of this size differ by 0.5 in FP16 and 4 in BF16"),
        ("RED008", "32 updates are added to one value in a row, the last one here"),
        ("RED009", "cancel to a result of at most 1: 10.0 significant bits are lost. FP16 has 11 bits. BF16 has 8 bits"),
        ("CON003", "a constant that differs from 1 by 1e-06 acts as exactly 1 in FP16 and BF16"),
        ("TRN002", "the guard 1e-09 of a root"),
        ("TRN003", "2 operations read this embedding's table"),
        ("NRM005", "a running statistic of 1e+06 does not fit FP16"),
    ],
)  # fmt: skip
def test_the_numbers_in_a_sentence_are_those_of_its_example(code: str, said: str) -> None:
    model, inputs = example(next(rule for rule in RULES if rule.code == code))
    toy = captured(model, *inputs)
    assert any(said in one.message for one in classify(toy.capture, toy.facts, RULES) if one.rule == code)


def test_the_example_of_an_unused_ignore(here: Path) -> None:
    (rule,) = (rule for rule in RULES if rule.code == "CFG001")
    norm = finding("NRM001", "pow_1", owner="blocks.0.ln")
    file = here / "pyproject.toml"
    file.write_text(rule.example.code)
    found = command_of({}, Command)
    assert [item.rule for item in apply_selection((norm,), found.select, found.ignores, RULES)] == ["NRM001", "CFG001"]
    file.write_text(rule.example.fixed)
    found = command_of({}, Command)
    assert apply_selection((norm,), found.select, found.ignores, RULES) == ()


# Collectives are measured as they run: waited for before their result is read.


def test_a_collective_is_waited_for_before_its_result_is_read() -> None:
    model = Function(lambda x: functional.all_reduce(x + 1.0, "sum", dist.group.WORLD)).eval()
    inputs = (torch.full((2, 4), 3.0),)
    traced = captured(model, *inputs).capture
    with Seen() as recorded:
        found = measure(traced, model, (inputs, {}), ("fp16", "bf16"))
    (name,) = (name for name, node in traced.nodes.items() if node.op.startswith("_c10d_functional.all_reduce"))
    assert found.ranges[name].max_abs == 4.0  # of one rank, 3 + 1
    after = {second for first, second in pairwise(recorded.names) if first == "_c10d_functional.all_reduce.default"}
    assert after == {"_c10d_functional.wait_tensor.default"}


# The failures of the corpus are foreseen: those that an operation, a literal or a dtype gives away, before any tensor is run.

CORPUS_RULES = tuple(rule for rule in load_rules() if rule.severity != "info" and rule.family != "measured")
FAILING = [case for case in CASES if not case.only_on_cpu]
STATIC = [case for case in FAILING if case.evidence == "static"]


def foreseen(case: Case, *, ranges: bool) -> list[Finding]:
    """Warnings and errors on a culprit, about a format in which the case fails; without ranges no tensor is run."""
    model, inputs = case.build()
    toy = captured(model, *inputs)
    held = {place.name for place in toy.capture.placeholders if place.kind != "input"}
    weights = {name: span for name, span in toy.ranges.items() if name in held}
    facts = toy.facts if ranges else gather(toy.capture, weights)
    return [
        finding
        for finding in classify(toy.capture, facts, CORPUS_RULES)
        if set(finding.formats) & set(case.formats) and is_culprit(finding, case)
    ]


def is_culprit(finding: Finding, case: Case) -> bool:
    names = {operation(finding.op).name, "to" if finding.op.startswith("aten._to_copy.") else ""}
    return any(op in names and finding.owner.startswith(owner) for op, owner in case.culprits)


@pytest.mark.parametrize("case", STATIC, ids=lambda case: case.name)
def test_static_failures_are_foreseen_without_running_anything(case: Case) -> None:
    assert foreseen(case, ranges=False)


@pytest.mark.parametrize("case", [case for case in FAILING if case not in STATIC], ids=lambda case: case.name)
def test_the_others_are_foreseen_from_the_magnitudes_of_one_run_in_fp32(case: Case) -> None:
    assert foreseen(case, ranges=True)


@pytest.mark.parametrize("case", RULE_CASES, ids=lambda case: case.name)
def test_findings_name_exactly_the_expected_nodes(case: RuleCase) -> None:
    torch.manual_seed(0)
    toy = captured(case.model(), *case.inputs)
    found: dict[str, set[str]] = {rule.code: set() for rule in RULES}
    for one in classify(toy.capture, toy.facts, RULES):
        found[one.rule].add(one.node)
    expected = dict(case.fires) | {code: set() for code in case.silent}
    assert {code: found[code] for code in expected} == expected


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.code)
def test_every_op_a_rule_names_exists(rule: Rule) -> None:
    for op in [*rule.match.ops, *(op for node in rule.match.nodes.values() for op in node.ops)]:
        if "*" not in op and not op.startswith("auditor."):
            namespace, name, *overload = op.split(".")
            packet = getattr(getattr(torch.ops, namespace), name)
            assert not overload or overload[0] in packet.overloads()


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.code)
def test_every_rule_cites_an_address_and_gives_code(rule: Rule) -> None:
    assert all(re.search(r"https://\S+$", reference) for reference in rule.references)
    assert "    " in rule.advice or rule.severity == "info"
