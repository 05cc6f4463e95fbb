"""docs/rules.md against the rules and the facts it is generated from."""

from __future__ import annotations

import re

from auditor.rulebook.explain import reference
from auditor.rulebook.findings import classify
from auditor.rulebook.load import load_rules
from tests.rules.examples import example
from tests.support.capturing import captured


def text(root) -> str:
    return (root / "docs" / "rules.md").read_text(encoding="utf-8")


def test_committed_file_is_up_to_date(root):
    assert text(root) == reference(load_rules()), "run `make docs`"


def test_links_of_the_overview_lead_to_headings(root):
    headings = re.findall(r"(?m)^#+ (.+)$", text(root))
    # How code hosts make an anchor of a heading: lower case, punctuation but hyphens gone, spaces to hyphens.
    anchors = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    links = re.findall(r"\]\(#([^)]+)\)", text(root))
    assert len(links) == len(load_rules())
    assert set(links) <= anchors


def test_the_rule_shown_to_those_who_write_their_own_is_one(root, tmp_path):
    page = (root / "docs" / "own-rules.md").read_text(encoding="utf-8")
    shown = re.search(r"(?s)## Rules of your own\n.*?```toml\n(.*?)```", page)[1]
    path = tmp_path / "own" / "OWN001-tangent-near-a-pole.toml"
    path.parent.mkdir()
    path.write_text(shown)
    (rule,) = load_rules([tmp_path])
    model, inputs = example(rule)
    toy = captured(model, *inputs)
    assert [finding.node for finding in classify(toy.capture, toy.facts, [rule])] == ["tan"]
