"""Rule files: what becomes a rule, what is refused, chains found in a graph, and rules in words."""

import json
import re
from pathlib import Path

import pytest
import torch

from auditor.errors import AuditorError
from auditor.rulebook.conditions import Condition
from auditor.rulebook.explain import as_data, explain, pages
from auditor.rulebook.load import load_rules, spread
from auditor.rulebook.patterns import Matcher
from auditor.rulebook.rule import Chain, ChainNode, Example, Match, facts_shown, fill_message, without
from tests.support.capturing import Function, captured
from tests.support.refusing import refused

RULE = """severity = "warning"
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
    """The rule as a file under `root`, in a family's directory."""
    path = root / family / f"{stem}.toml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


CHAIN = """
[[match.chain]]
paths = ["a > b? > c"]
report = "a"
[match.nodes]
a = { ops = ["aten.exp"] }
b = { ops = ["aten.neg"] }
c = { ops = ["aten.sum"] }
"""

EXAMPLE = """[example]
inputs = ["torch.ones(4)"]
code = "def forward(x): return x.sum()"
fixed = "def forward(x): return x.mean()"

"""


def test_codes_are_unique_and_families_share_a_prefix(tmp_path: Path) -> None:
    write(tmp_path)
    write(tmp_path, family="others")
    with refused(AuditorError, "rule-code-twice"):
        load_rules([tmp_path])
    (tmp_path / "others" / "TST001-bad-thing.toml").unlink()
    write(tmp_path, stem="ABC001-bad-thing")
    with refused(AuditorError, "rule-prefix"):
        load_rules([tmp_path])


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        ('supersedes = ["TST002"]', 'formats = ["fp16", "bf16"]', "TST002 also covers bf16, which TST001 does not"),
        ('supersedes = ["TST002"]', 'formats = ["fp16"]\nsupersedes = ["TST001"]', "TST002 supersedes TST001 in turn"),
        ('supersedes = ["TST001"]', 'formats = ["fp16"]', "TST001 supersedes TST001 in turn"),
    ],
)
def test_a_rule_supersedes_only_what_it_can_stand_for(tmp_path: Path, first: str, second: str, words: str) -> None:
    path = write(tmp_path, RULE.replace('formats = ["fp16"]', f'formats = ["fp16"]\n{first}'))
    write(tmp_path, RULE.replace('formats = ["fp16"]', second), stem="TST002-bad-thing")
    with pytest.raises(AuditorError) as caught:
        load_rules([tmp_path])
    assert str(caught.value) == f"{path}:4: supersedes: {words}"


def test_a_directory_without_rules_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AuditorError, match="contains no rule"):
        load_rules([tmp_path])


def test_each_family_has_a_page_that_the_index_leads_to(tmp_path: Path) -> None:
    write(tmp_path)
    write(tmp_path, family="early", stem="ABC001-bad-thing")
    written = pages(load_rules([tmp_path]))
    assert [*written] == ["rules.md", "rules/early.md", "rules/tests.md"]
    headings = re.findall(r"(?m)^(##?) ([A-Z].+)$", written["rules.md"])
    assert headings == [("#", "Rules"), *(("##", name) for name in ("Early", "Tests", "Facts"))]
    rows = re.findall(r"(?m)^\| \[(\w+)\]\((\S+)#([\w-]+)\) \| bad-thing \|", written["rules.md"])
    assert rows == [
        ("ABC001", "rules/early.md", "abc001-bad-thing"),
        ("TST001", "rules/tests.md", "tst001-bad-thing"),
    ]
    for code, file, _ in rows:
        assert f"\n## {code}: bad-thing\n" in written[file]
        assert "\n### What it looks for\n" in written[file]


# The form of a rule file: what becomes a rule, and what is refused, by file, line and key.


def test_a_rule_file_becomes_a_rule(tmp_path: Path) -> None:
    path = write(tmp_path)
    (rule,) = load_rules([tmp_path])
    assert (rule.code, rule.name, rule.family, rule.path) == ("TST001", "bad-thing", "tests", path)
    assert (rule.severity, rule.confidence, rule.formats) == ("warning", "low", ("fp16",))
    assert rule.match.ops == ("aten.sum",)
    long = Condition("fact", "reduction_length", {"above": 8})
    assert rule.when == Condition("all", parts=(Condition("fact", "upcast", {"equals": False}), long))


FACT = '"reduction_length", above'


@pytest.mark.parametrize(
    ("old", "new", "line", "words", "slug"),
    [
        ('"warning"', '"x"', 1, "severity: input should be 'info', 'warning' or 'error', not 'x'", "rule-bad-value"),
        ('why = "because"\n', "", 1, "why: is missing", "rule-missing-key"),
        ('why = "because"', "why = 3", 6, "why: input should be a valid string, not 3", "rule-bad-type"),
        ('why = "because"', 'why = "because"\ncolor = "red"', 7, "color: unknown key", "rule-unknown-key"),
        ("above = 8", 'above = "8"', 4, "reduction_length is a number, and '8' is not", "rule-bad-type"),
        ("above = 8", "matches = 8", 4, "when[0].matches: unknown key", "rule-unknown-key"),
        (", above = 8", "", 4, "has no comparison for reduction_length", "rule-missing-key"),
        (FACT, '"reduction", above', 4, "'reduction' is not a fact", "rule-bad-value"),
        (FACT, '"headroom_bits", above', 4, "depends on the format: name one, as in", "rule-bad-value"),
        (FACT, '"headroom_bits.fp17", above', 4, "'fp17' is not one of tf32, bf16", "rule-bad-value"),
        (FACT, '"numel.fp16", above', 4, "'numel' does not depend on the format", "rule-bad-value"),
        ("{reduction_length}", "{reason.bf16:.3g}", 5, "is not a valid template", "rule-bad-value"),
        ("{reduction_length}", "{reduction_length", 5, "is not a valid template", "rule-bad-value"),
        ('formats = ["fp16"]', 'formats = ["half"]', 3, "formats[0]: 'half' is not one of", "rule-bad-value"),
        ('why = "because"', "why = ", 6, "Invalid value", "rule-not-toml"),
        ("when", "measurable = 1\nwhen", 4, "measurable: input should be a valid boolean, not 1", "rule-bad-type"),
        ('formats = ["fp16"]', 'formats = ["fp16"]\nsupersedes = ["XYZ001"]', 4, "no rule is called", "rule-bad-value"),
        ("[match]", '[example]\ncod = "x"\n\n[match]', 11, "example.cod: unknown key", "rule-unknown-key"),
        ("[match]", '[example]\nfixed = "x"\n\n[match]', 10, "example.code: is missing", "rule-missing-key"),
        ('report = "a"', 'report = "z"', 0, "report: 'z' must be a step of the paths", "rule-bad-value"),
        ('report = "a"', 'report = "b"', 0, "must be a step of the paths, without '?'", "rule-bad-value"),
        ("a > b? > c", "a > d", 0, "'d' is not defined under nodes", "rule-bad-value"),
    ],
)
def test_a_malformed_file_is_refused_by_file_line_and_key(
    tmp_path: Path, old: str, new: str, line: int, words: str, slug: str
) -> None:
    text = RULE if line else RULE + CHAIN  # of a chain the line is not held
    assert old in text
    path = write(tmp_path, text.replace(old, new))
    with pytest.raises(AuditorError) as caught:
        load_rules([tmp_path])
    assert str(caught.value).startswith(f"{path}:{line or ''}")
    assert words in str(caught.value)
    assert caught.value.slug == slug


def test_a_rule_of_ones_own_needs_no_example(tmp_path: Path) -> None:
    write(tmp_path)
    (rule,) = load_rules([tmp_path])
    assert rule.example is None
    assert "## Example" not in explain(rule)


# Where a rule's match applies: patterns of operations, and chains found in a graph.


def found(tmp_path: Path, function: object) -> set[str]:
    write(tmp_path, RULE.split("[match]")[0] + CHAIN)
    (rule,) = load_rules([tmp_path])
    toy = captured(Function(function), torch.ones(4, 4))
    return Matcher(toy.capture, toy.facts).find(rule.match)


def test_a_chain_is_found_with_and_without_its_optional_node(tmp_path: Path) -> None:
    assert found(tmp_path, lambda x: (x.exp().sum(), (-x.cos().exp()).sum())) == {"exp", "exp_1"}


def test_a_chain_looks_through_reshapes_and_casts(tmp_path: Path) -> None:
    assert found(tmp_path, lambda x: x.exp().view(2, 8).transpose(0, 1).double().sum()) == {"exp"}


def test_a_role_that_any_operation_plays_is_played_by_inputs_too() -> None:
    # x stands at the head of both paths and is no operation; in the second chain the two roles must be two values.
    toy = captured(Function(lambda x: x.exp() * x), torch.ones(2))
    nodes = {"x": ChainNode(("*",)), "exp": ChainNode(("aten.exp",)), "product": ChainNode(("aten.mul",))}
    both = Match(nodes=nodes, chains=(Chain(("x > exp > product", "x > product"), "product"),))
    assert Matcher(toy.capture, toy.facts).find(both) == {"mul"}
    squared = captured(Function(lambda x: x.exp() * x.exp()), torch.ones(2))
    assert Matcher(squared.capture, squared.facts).find(both) == set()


def test_a_condition_on_a_role_is_asked_of_the_node_that_plays_it() -> None:
    toy = captured(Function(lambda x: (x.exp() + 1.0, x.sin() + 2.0)), torch.ones(2))
    two = ChainNode(("aten.add",), Condition("fact", "constant_max_abs", {"equals": 2}))
    match = Match(nodes={"wave": ChainNode(("aten.*",)), "shift": two}, chains=(Chain(("wave > shift",), "wave"),))
    assert Matcher(toy.capture, toy.facts).find(match) == {"sin"}


# Messages of rules: which facts they show, and how they read.


def test_the_facts_of_a_message_in_the_order_written() -> None:
    assert facts_shown("{op} has {headroom_bits.fp16:.1f} bits, {{op}}", ("bf16",)) == ["op", "headroom_bits.fp16"]


def test_a_message_names_the_formats_it_speaks_of() -> None:
    assert fill_message("raises in {formats}", {}, ("fp16", "bf16")) == "raises in FP16 and BF16"


def test_a_fact_that_is_kept_by_format_is_shown_with_its_format() -> None:
    facts = {"spacing": {"fp16": 0.5, "bf16": 4.0}, "eps": None}
    assert fill_message("{spacing:.2g}", facts, ("fp16", "bf16")) == "0.5 in FP16 and 4 in BF16"
    assert fill_message("{spacing.fp16}, {spacing.tf32:.2g}, {eps:g}", facts, ("bf16",)) == "0.5, unknown, unknown"


def test_sentences_about_other_formats_are_left_out() -> None:
    text = "Numbers are apart. At 512 BF16 has\nmultiples of 4, FP16 of 0.5. They tie."
    assert without((), text) == text
    assert without(("fp16",), text) == "Numbers are apart. They tie."
    assert (
        without(("bf16", "fp8_block"), f"FP8 blocks stay. FP8 block goes. {text}")
        == "FP8 blocks stay. Numbers are apart. They tie."
    )


def test_formats_are_looked_for_by_one_pattern_that_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each audit reads the texts of all rules."""
    without(("fp16", "bf16"), "")
    monkeypatch.setattr(re, "compile", None)
    assert without(("bf16", "fp16"), "One in BF16. Two.") == "Two."


# Rules about each format, made into one for every audited one that has none of its own.

RULES = load_rules()


def of_measurements(formats: tuple[str, ...]) -> dict[tuple[str, ...], str]:
    return {rule.formats: rule.code for rule in spread(RULES, formats) if rule.family == "measured"}


def test_every_audited_format_has_one_of_the_measurement() -> None:
    assert of_measurements(("fp16", "bf16")) == {("fp16",): "MSR001", ("bf16",): "MSR002"}
    found = of_measurements(("bf16", "fp8_e4m3", "fp8_e5m2"))
    assert [found[fmt,] for fmt in ("bf16", "fp8_e4m3", "fp8_e5m2")] == ["MSR002", "MSR003", "MSR003"]


# A rule in words and as data: sections, the example, a chain drawn once.


def test_a_rule_with_an_example_is_read_explained_and_all_in_its_data(tmp_path: Path) -> None:
    write(tmp_path, RULE.replace("[match]", EXAMPLE + "[match]"))
    (rule,) = load_rules([tmp_path])
    assert rule.example == Example(
        "def forward(x): return x.sum()", "def forward(x): return x.mean()", ("torch.ones(4)",)
    )
    sections = re.findall(r"(?m)^## (.+)$", explain(rule))
    assert sections == ["Why", "Example", "What to do", "What it looks for", "References"]
    for line in (rule.example.code, rule.example.fixed):
        assert f"\n    {line}\n" in explain(rule)
    assert "called with `torch.ones(4)`" in explain(rule)
    assert "Confidence: low, or high if the operation is measured to be unsafe." in explain(rule)
    data = json.loads(json.dumps(as_data(rule)))
    assert data["looks_for"] == ["operations: `aten.sum`"]
    assert data["fires_where"] == "`upcast` is false, and `reduction_length` is above 8 elements"
    assert data["example"]["inputs"] == ["torch.ones(4)"]
    assert {"code", "name", "family", "why", "advice", "message", "references", "supersedes"} <= data.keys()


def test_explain_draws_a_chain_once(tmp_path: Path) -> None:
    write(tmp_path, RULE.split("[match]")[0] + CHAIN)
    (rule,) = load_rules([tmp_path])
    assert explain(rule).count("a > b? > c") == 1
    assert "b is `aten.neg`" in explain(rule)
