"""Rule files: what is accepted, what is refused and with which words, and how conditions and chains evaluate."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from auditor.errors import AuditorError, RuleError
from auditor.facts import NodeFacts
from auditor.resources import resource_dir
from auditor.rulebook import Condition, Example, Matcher, as_data, evaluate, explain, facts_used, load_rules
from auditor.rulebook.conditions import describe
from auditor.rulebook.patterns import op_matches
from tests.capturing import Function, captured

RULE = """code = "TST001"
name = "bad-thing"
since = "0.1.0"
status = "stable"
severity = "warning"
confidence = "low"
formats = ["fp16"]
when = [{ fact = "reduction_length", above = 8 }]
message = "sums {reduction_length} numbers"
why = "because"
advice = "do not"
references = ["a paper: https://example.org"]

[match]
ops = ["aten.sum"]
"""


def write(root: Path, text: str = RULE, family: str = "tests", stem: str = "TST001-bad-thing") -> Path:
    path = root / family / f"{stem}.toml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_a_rule_file_becomes_a_rule(tmp_path: Path) -> None:
    path = write(tmp_path)
    (rule,) = load_rules([tmp_path])
    assert (rule.code, rule.name, rule.family, rule.path) == ("TST001", "bad-thing", "tests", path)
    assert (rule.severity, rule.confidence, rule.formats) == ("warning", "low", ("fp16",))
    assert rule.match.ops == ("aten.sum",)
    assert rule.when == Condition("all", parts=(Condition("fact", "reduction_length", {"above": 8}),))


@pytest.mark.parametrize(
    ("old", "new", "line", "words", "slug"),
    [
        ('severity = "warning"', 'severity = "fatal"', 5, "severity: 'fatal' is not one of", "rule-bad-value"),
        ('since = "0.1.0"\n', "", 1, "since: is missing", "rule-missing-key"),
        ('why = "because"', "why = 3", 10, "why: must be a string, not int", "rule-bad-type"),
        ('why = "because"', 'why = " "', 10, "why: must not be empty", "rule-bad-value"),
        ('why = "because"', 'why = "because"\ncolour = "red"', 11, "colour: unknown key", "rule-unknown-key"),
        ('code = "TST001"', 'code = "T1"', 1, "code: 'T1' does not have the form", "rule-bad-value"),
        ('name = "bad-thing"', 'name = "other"', 2, "the file must be called TST001-other.toml", "rule-bad-value"),
        ("above = 8", "over = 8", 8, "when[0].over: unknown key", "rule-unknown-key"),
        ("above = 8", 'above = "8"', 8, "reduction_length is a number; '8' is none", "rule-bad-type"),
        ("above = 8", "matches = 8", 8, "when[0].matches: unknown key", "rule-unknown-key"),
        (", above = 8", "", 8, "compares reduction_length with nothing", "rule-missing-key"),
        ('"reduction_length", above', '"reduction", above', 8, "'reduction' is not one of", "rule-bad-value"),
        ("{reduction_length}", "{length}", 9, "'length' is not a fact", "rule-bad-value"),
        ("{reduction_length}", "{reduction_length", 9, "is no valid template", "rule-bad-value"),
        ("{reduction_length}", "{op:.3g}", 9, "is no valid template", "rule-bad-value"),
        ('formats = ["fp16"]', 'formats = ["half"]', 7, "formats: 'half' is not one of", "rule-bad-value"),
        ("formats = [", "formats = [[], ", 7, "must be a non-empty list of strings", "rule-bad-type"),
        ('ops = ["aten.sum"]', 'op = "aten.sum"', 15, "match.op: unknown key", "rule-unknown-key"),
        ('ops = ["aten.sum"]', "", 14, "says nothing", "rule-missing-key"),
        ('ops = ["aten.sum"]', 'position = "middle"', 15, "match.position: 'middle' is not one of", "rule-bad-value"),
        ('why = "because"', "why = ", 10, "file:", "rule-not-toml"),
        (
            'formats = ["fp16"]',
            'formats = ["fp16"]\nmeasurable = 1',
            8,
            "must be true or false, not int",
            "rule-bad-type",
        ),
        ('formats = ["fp16"]', 'formats = ["fp16"]\nsupersedes = ["XYZ001"]', 8, "no rule is called", "rule-bad-value"),
        ("[match]", "[example]\ncode = 3\n\n[match]", 15, "example.code: must be a string", "rule-bad-type"),
        ("[match]", '[example]\ncod = "x"\n\n[match]', 15, "example.cod: unknown key", "rule-unknown-key"),
        ("[match]", '[example]\nfixed = "x"\n\n[match]', 14, "example.code: is missing", "rule-missing-key"),
    ],
)
def test_a_malformed_file_is_refused_by_file_line_and_key(
    tmp_path: Path, old: str, new: str, line: int, words: str, slug: str
) -> None:
    assert old in RULE
    path = write(tmp_path, RULE.replace(old, new))
    with pytest.raises(RuleError) as caught:
        load_rules([tmp_path])
    assert str(caught.value).startswith(f"{path}:{line}: ")
    assert words in str(caught.value)
    assert caught.value.slug == slug


CHAIN = """
[[match.chain]]
paths = ["a > b? > c"]
report = "a"
[match.chain.nodes.a]
ops = ["aten.exp"]
[match.chain.nodes.b]
ops = ["aten.neg"]
[match.chain.nodes.c]
ops = ["aten.sum"]
"""


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('report = "a"', 'report = "z"', "report: 'z' is not one of"),
        ('report = "a"', 'report = "b"', "the reported one is not optional"),
        ("a > b? > c", "a > d", "'d' is not described under nodes"),
        ("a > b? > c", "a > c", "every node stands on a path"),
    ],
)
def test_a_malformed_chain_is_refused(tmp_path: Path, old: str, new: str, words: str) -> None:
    write(tmp_path, RULE + CHAIN.replace(old, new))
    with pytest.raises(RuleError, match=words.replace("?", r"\?")):
        load_rules([tmp_path])


def test_codes_are_unique_and_families_share_a_prefix(tmp_path: Path) -> None:
    write(tmp_path)
    write(tmp_path, family="others")
    with pytest.raises(RuleError) as twice:
        load_rules([tmp_path])
    assert twice.value.slug == "rule-code-twice"
    (tmp_path / "others" / "TST001-bad-thing.toml").unlink()
    write(tmp_path, RULE.replace("TST001", "ABC001"), stem="ABC001-bad-thing")
    with pytest.raises(RuleError) as prefix:
        load_rules([tmp_path])
    assert prefix.value.slug == "rule-prefix"


SECOND = RULE.replace("TST001", "TST002")


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        ('supersedes = ["TST002"]', 'formats = ["fp16", "bf16"]', "TST002 also speaks of bf16, which TST001 does not"),
        ('supersedes = ["TST002"]', 'formats = ["fp16"]\nsupersedes = ["TST001"]', "TST002 supersedes TST001 in turn"),
        ('supersedes = ["TST001"]', 'formats = ["fp16"]', "TST001 supersedes TST001 in turn"),
    ],
)
def test_a_rule_supersedes_only_what_it_can_stand_for(tmp_path: Path, first: str, second: str, words: str) -> None:
    path = write(tmp_path, RULE.replace('formats = ["fp16"]', f'formats = ["fp16"]\n{first}'))
    write(tmp_path, SECOND.replace('formats = ["fp16"]', second), stem="TST002-bad-thing")
    with pytest.raises(RuleError) as caught:
        load_rules([tmp_path])
    assert str(caught.value) == f"{path}:8: supersedes: {words}"


EXAMPLE = """[example]
inputs = ["torch.ones(4)"]
code = "def forward(x): return x.sum()"
fixed = "def forward(x): return x.mean()"

"""


def test_an_example_is_read_and_explained(tmp_path: Path) -> None:
    write(tmp_path, RULE.replace("[match]", EXAMPLE + "[match]"))
    (rule,) = load_rules([tmp_path])
    assert rule.example == Example(
        "def forward(x): return x.sum()", "def forward(x): return x.mean()", ("torch.ones(4)",)
    )
    sections = re.findall(r"(?m)^## (.+)$", explain(rule))
    assert sections == ["What it looks for", "Why", "Example", "What to do", "References"]
    for line in (rule.example.code, rule.example.fixed):
        assert f"\n    {line}\n" in explain(rule)
    assert "called with `torch.ones(4)`" in explain(rule)


def test_a_rule_of_ones_own_needs_no_example(tmp_path: Path) -> None:
    write(tmp_path)
    (rule,) = load_rules([tmp_path])
    assert rule.example is None
    assert "## Example" not in explain(rule)


def test_all_of_a_rule_is_in_its_data(tmp_path: Path) -> None:
    write(tmp_path, RULE.replace("[match]", EXAMPLE + "[match]"))
    (rule,) = load_rules([tmp_path])
    data = json.loads(json.dumps(as_data(rule)))
    assert data["looks_for"] == ["operations: `aten.sum`"]
    assert data["fires_where"] == "reduction_length above 8 elements"
    assert data["example"]["inputs"] == ["torch.ones(4)"]
    assert {"code", "name", "family", "why", "advice", "message", "references", "supersedes"} <= data.keys()


def test_a_directory_without_rules_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RuleError, match="holds no rule"):
        load_rules([tmp_path])


def test_users_rules_join_the_shipped_ones(tmp_path: Path) -> None:
    write(tmp_path)
    codes = [rule.code for rule in load_rules([resource_dir("rules"), tmp_path])]
    assert codes == sorted(codes)
    assert {"NRM001", "TST001"} <= set(codes)


def test_a_missing_resource_says_what_to_do() -> None:
    with pytest.raises(AuditorError, match="reinstall"):
        resource_dir("no-such-directory")


FACTS = replace(
    NodeFacts(**dict.fromkeys(NodeFacts.__dataclass_fields__)),  # type: ignore[arg-type]
    op="aten.sum.default",
    upcast=False,
    reduction_length=100,
    consumers=("aten.mul.Tensor",),
    constants=(),
)


def leaf(fact: str, **comparisons: object) -> Condition:
    return Condition("fact", fact, comparisons)


@pytest.mark.parametrize(
    ("condition", "expected"),
    [
        (leaf("reduction_length", above=100), False),
        (leaf("reduction_length", at_least=100), True),
        (leaf("reduction_length", below=100), False),
        (leaf("reduction_length", at_most=100), True),
        (leaf("reduction_length", above=10, below=50), False),
        (leaf("reduction_length", is_in=(1, 100)), True),
        (leaf("op", matches="aten.sum.*"), True),
        (leaf("op", equals="aten.sum"), False),
        (leaf("upcast", equals=False), True),
        (leaf("consumers", contains="aten.mul*"), True),
        (leaf("consumers", contains="mul"), False),
        (leaf("constants", present=True), False),
        (leaf("eps", present=False), True),
        (leaf("reduction_length", present=True, above=100), False),
        (leaf("eps", above=0), None),
        (Condition("not", parts=(leaf("eps", above=0),)), None),
        (Condition("any", parts=(leaf("eps", above=0), leaf("upcast", equals=False))), True),
        (Condition("any", parts=(leaf("eps", above=0), leaf("upcast", equals=True))), None),
        (Condition("all", parts=(leaf("eps", above=0), leaf("upcast", equals=True))), False),
        (Condition("all", parts=()), True),
    ],
)
def test_conditions(condition: Condition, expected: bool | None) -> None:
    assert evaluate(condition, FACTS) is expected


@given(st.floats(allow_nan=True), st.sampled_from(["above", "at_least", "below", "at_most"]))
def test_a_comparison_with_nan_never_holds(bound: float, comparison: str) -> None:
    nan = replace(FACTS, output_max_abs=float("nan"))
    assert evaluate(leaf("output_max_abs", **{comparison: bound}), nan) is False


def test_a_condition_in_words() -> None:
    condition = Condition(
        "all",
        parts=(
            leaf("reduction_length", above=8),
            Condition("any", parts=(leaf("upcast", equals=False), leaf("op", matches="a*"))),
        ),
    )
    assert describe(condition) == "reduction_length above 8 elements, and (not upcast or op matches a*)"
    assert list(facts_used(condition)) == ["reduction_length", "upcast", "op"]


def test_what_is_known_reads_apart_from_what_holds() -> None:
    leaves = [leaf("eps", present=False), leaf("output_max_abs", present=True), leaf("constants", present=False)]
    assert [describe(item) for item in leaves] == ["unknown eps", "known output_max_abs", "no constants"]


def test_op_patterns() -> None:
    assert op_matches("aten.softmax.int", "aten.softmax")
    assert op_matches("aten.softmax.int", "aten.softmax.int")
    assert op_matches("aten.linalg_svd.default", "aten.linalg_*")
    assert not op_matches("aten.softmax.int", "aten.softmax.default")
    assert not op_matches("aten.log_softmax.int", "aten.softmax")


def found(tmp_path: Path, function: object) -> set[str]:
    write(tmp_path, RULE.split("[match]")[0] + CHAIN)
    (rule,) = load_rules([tmp_path])
    toy = captured(Function(function), torch.ones(4, 4))  # type: ignore[arg-type]
    return Matcher(toy.capture, toy.facts).find(rule.match)


def test_a_chain_is_found_with_and_without_its_optional_node(tmp_path: Path) -> None:
    assert found(tmp_path, lambda x: (x.exp().sum(), (-x.cos().exp()).sum())) == {"exp", "exp_1"}


def test_a_chain_looks_through_reshapes_and_casts(tmp_path: Path) -> None:
    assert found(tmp_path, lambda x: x.exp().view(2, 8).transpose(0, 1).double().sum()) == {"exp"}


def test_a_chain_does_not_look_through_arithmetic(tmp_path: Path) -> None:
    assert found(tmp_path, lambda x: (x.exp().sin().sum(), x.sum().exp())) == set()


def test_explain_draws_a_chain_once(tmp_path: Path) -> None:
    write(tmp_path, RULE.split("[match]")[0] + CHAIN)
    (rule,) = load_rules([tmp_path])
    assert explain(rule).count("a > b? > c") == 1
    assert "b is `aten.neg`" in explain(rule)
