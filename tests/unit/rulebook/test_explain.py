"""A rule in words and as data: sections, the example, a chain drawn once."""

from __future__ import annotations

import json
import re
from pathlib import Path

from auditor.rulebook.explain import as_data, explain
from auditor.rulebook.load import load_rules
from auditor.rulebook.rule import Example
from tests.support.rule_files import CHAIN, EXAMPLE, RULE, write


def test_an_example_is_read_and_explained(tmp_path: Path) -> None:
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
    assert "Confidence: low, and high where the operation is measured to be unsafe." in explain(rule)


def test_all_of_a_rule_is_in_its_data(tmp_path: Path) -> None:
    write(tmp_path, RULE.replace("[match]", EXAMPLE + "[match]"))
    (rule,) = load_rules([tmp_path])
    data = json.loads(json.dumps(as_data(rule)))
    assert data["looks_for"] == ["operations: `aten.sum`"]
    assert data["fires_where"] == "not upcast, and reduction_length above 8 elements"
    assert data["example"]["inputs"] == ["torch.ones(4)"]
    assert {"code", "name", "family", "why", "advice", "message", "references", "supersedes"} <= data.keys()


def test_explain_draws_a_chain_once(tmp_path: Path) -> None:
    write(tmp_path, RULE.split("[match]")[0] + CHAIN)
    (rule,) = load_rules([tmp_path])
    assert explain(rule).count("a > b? > c") == 1
    assert "b is `aten.neg`" in explain(rule)
