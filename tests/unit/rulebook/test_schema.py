"""The form of a rule file: what becomes a rule, and what is refused, by file, line and key."""

from __future__ import annotations

from pathlib import Path

import pytest

from auditor.errors import AuditorError
from auditor.rulebook.conditions import Condition
from auditor.rulebook.explain import explain
from auditor.rulebook.load import load_rules
from tests.support.rule_files import CHAIN, RULE, write


def test_a_rule_file_becomes_a_rule(tmp_path: Path) -> None:
    path = write(tmp_path)
    (rule,) = load_rules([tmp_path])
    assert (rule.code, rule.name, rule.family, rule.path) == ("TST001", "bad-thing", "tests", path)
    assert (rule.severity, rule.confidence, rule.formats) == ("warning", "low", ("fp16",))
    assert rule.match.ops == ("aten.sum",)
    long = Condition("fact", "reduction_length", {"above": 8})
    assert rule.when == Condition("all", parts=(Condition("fact", "upcast", {"equals": False}), long))


@pytest.mark.parametrize(
    ("old", "new", "line", "words", "slug"),
    [
        (
            'severity = "warning"',
            'severity = "fatal"',
            1,
            "severity: input should be 'info', 'warning' or 'error', not 'fatal'",
            "rule-bad-value",
        ),
        ('why = "because"\n', "", 1, "why: is missing", "rule-missing-key"),
        ('why = "because"', "why = 3", 6, "why: input should be a valid string, not 3", "rule-bad-type"),
        ('why = "because"', 'why = " "', 6, "why: must not be empty", "rule-bad-value"),
        ('why = "because"', 'why = "because"\ncolour = "red"', 7, "colour: unknown key", "rule-unknown-key"),
        ('why = "because"', 'why = "because"\ncode = "TST001"', 7, "code: unknown key", "rule-unknown-key"),
        ("above = 8", "over = 8", 4, "when[0].over: unknown key", "rule-unknown-key"),
        ("above = 8", 'above = "8"', 4, "reduction_length is a number; '8' is none", "rule-bad-type"),
        ("above = 8", "matches = 8", 4, "when[0].matches: unknown key", "rule-unknown-key"),
        (", above = 8", "", 4, "compares reduction_length with nothing", "rule-missing-key"),
        ('"reduction_length", above', '"reduction", above', 4, "'reduction' is not one of", "rule-bad-value"),
        ('"reduction_length", above', '"headroom_bits", above', 4, "kept by format: name one, as in", "rule-bad-value"),
        (
            '"reduction_length", above',
            '"headroom_bits.fp17", above',
            4,
            "'fp17' is not one of tf32, bf16",
            "rule-bad-value",
        ),
        ('"reduction_length", above', '"numel.fp16", above', 4, "'numel' is not kept by format", "rule-bad-value"),
        ("{reduction_length}", "[fp17: x]", 5, "has a clause on 'fp17', which is no format", "rule-bad-value"),
        ("{reduction_length}", "{reason.bf16:.3g}", 5, "is no valid template", "rule-bad-value"),
        ("{reduction_length}", "{length}", 5, "'length' is not a fact", "rule-bad-value"),
        ("{reduction_length}", "{reduction_length", 5, "is no valid template", "rule-bad-value"),
        ("{reduction_length}", "{op:.3g}", 5, "is no valid template", "rule-bad-value"),
        ('formats = ["fp16"]', 'formats = ["half"]', 3, "formats[0]: 'half' is not one of", "rule-bad-value"),
        ("formats = [", "formats = [[], ", 3, "formats[0]: input should be a valid string, not []", "rule-bad-type"),
        ('ops = ["aten.sum"]', 'op = "aten.sum"', 11, "match.op: unknown key", "rule-unknown-key"),
        ('ops = ["aten.sum"]', "", 10, "says nothing", "rule-missing-key"),
        (
            'ops = ["aten.sum"]',
            'position = "middle"',
            11,
            "match.position: input should be 'first' or 'last', not 'middle'",
            "rule-bad-value",
        ),
        ('why = "because"', "why = ", 6, "file:", "rule-not-toml"),
        (
            'formats = ["fp16"]',
            'formats = ["fp16"]\nmeasurable = 1',
            4,
            "measurable: input should be a valid boolean, not 1",
            "rule-bad-type",
        ),
        ('formats = ["fp16"]', 'formats = ["fp16"]\nsupersedes = ["XYZ001"]', 4, "no rule is called", "rule-bad-value"),
        (
            "[match]",
            "[example]\ncode = 3\n\n[match]",
            11,
            "example.code: input should be a valid string",
            "rule-bad-type",
        ),
        ("[match]", '[example]\ncod = "x"\n\n[match]', 11, "example.cod: unknown key", "rule-unknown-key"),
        ("[match]", '[example]\nfixed = "x"\n\n[match]', 10, "example.code: is missing", "rule-missing-key"),
    ],
)
def test_a_malformed_file_is_refused_by_file_line_and_key(
    tmp_path: Path, old: str, new: str, line: int, words: str, slug: str
) -> None:
    assert old in RULE
    path = write(tmp_path, RULE.replace(old, new))
    with pytest.raises(AuditorError) as caught:
        load_rules([tmp_path])
    assert str(caught.value).startswith(f"{path}:{line}: ")
    assert words in str(caught.value)
    assert caught.value.slug == slug


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('report = "a"', 'report = "z"', "report: 'z' is on no path"),
        ('report = "a"', 'report = "b"', "is on no path, or may be missing"),
        ("a > b? > c", "a > d", "'d' is not described under nodes"),
        ("a > b? > c", "a > c", "match.nodes.b: stands on no path"),
    ],
)
def test_a_malformed_chain_is_refused(tmp_path: Path, old: str, new: str, words: str) -> None:
    write(tmp_path, RULE + CHAIN.replace(old, new))
    with pytest.raises(AuditorError, match=words.replace("?", r"\?")):
        load_rules([tmp_path])


def test_a_rule_of_ones_own_needs_no_example(tmp_path: Path) -> None:
    write(tmp_path)
    (rule,) = load_rules([tmp_path])
    assert rule.example is None
    assert "## Example" not in explain(rule)
