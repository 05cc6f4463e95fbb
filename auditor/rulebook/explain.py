"""Renders rules as Markdown or JSON data: one rule, or all rules with the table of facts."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

from .conditions import COMPARISONS, describe
from .facts import FACTS
from .rule import Chain, Example, Match, Rule

_HEAD = """\
# Rules

`make docs` generates this page from the files under `rules/`. A rule describes code that often fails in a format, and
the remedy. The measurement tests whether the code fails in your model. Codes are never reused. How to select rules and
add your own: [own-rules.md](own-rules.md).
"""

_FACTS_HEAD = """\
## Facts

The conditions of rules, built-in or your own (`--rules DIR`), compare these facts about an operation. A condition on an
unknown fact is neither true nor false, so a rule reports an operation only if its facts are known.
"""


def as_data(rule: Rule) -> dict[str, Any]:
    """The rule as JSON data, with its match and its condition in words."""
    fields = ("code", "name", "family", "severity", "confidence", "formats", "supersedes")
    texts = ("message", "why", "advice", "references")
    return {
        **{name: getattr(rule, name) for name in fields},
        "looks_for": _places(rule.match),
        "fires_where": describe(rule.when),
        **{name: getattr(rule, name) for name in texts},
        "other_advice": [{"where": describe(one.when), "advice": one.advice} for one in rule.other_advice],
        "example": vars(rule.example) if rule.example else None,
    }


def explain(rule: Rule) -> str:
    """Markdown about one rule: why it matters, an example, the remedy, then its match and sources."""
    condition, example = describe(rule.when), rule.example or Example("")
    called = ", ".join(f"`{item}`" for item in example.inputs)
    superseded = ", ".join(rule.supersedes)
    raised = rule.measurable and rule.confidence != "high"
    confidence = f"{rule.confidence}{', or high if the operation is measured to be unsafe' if raised else ''}"
    sections = [
        f"# {rule.code}: {rule.name}",
        f"Severity: {rule.severity}. Confidence: {confidence}. Formats: {', '.join(rule.formats)}. "
        f"Family: {rule.family}.",
        "## Why",
        rule.why,
        example.code and f"## Example\n\nThis code is reported:\n\n{textwrap.indent(example.code, '    ')}",
        called and f"if it is called with {called}.",
        "## What to do",
        rule.advice,
        *(f"Instead, where {describe(one.when)}:\n\n{one.advice}" for one in rule.other_advice),
        example.fixed and f"The repaired example:\n\n{textwrap.indent(example.fixed, '    ')}",
        example.changes and f"The repaired code computes a different result in FP32: {example.changes}",
        "## What it looks for",
        "\n".join(f"- {line}" for line in _places(rule.match)),
        condition and f"An operation is reported if {condition}.",
        superseded and f"Its findings replace findings of {superseded}, and get the highest severity among them.",
        "## References",
        "\n".join(f"- {reference}" for reference in rule.references),
    ]
    return "\n\n".join(filter(None, sections)) + "\n"


def _places(match: Match) -> list[str]:
    operations = "operations: " + ", ".join(f"`{op}`" for op in match.ops)
    everywhere = match.chains and match.ops == ("*",)
    return [*([] if everywhere else [operations]), *(_diagram(chain, match) for chain in match.chains)]


def _diagram(chain: Chain, match: Match) -> str:
    names = dict.fromkeys(name.rstrip("?") for path in chain.steps for name in path)
    nodes = "; ".join(
        f"{name} is {' or '.join(f'`{op}`' for op in match.nodes[name].ops)}"
        for name in names
        if match.nodes[name].ops != ("*",)
    )
    paths = " and ".join(f"`{path}`" for path in chain.paths)
    return f"operations in a chain, ignoring reshapes and casts: {paths}, where {nodes} (`?`: optional)"


def reference(rules: Sequence[Rule]) -> str:
    """Markdown: an overview, every rule by family, and the table of facts."""
    families = [
        "\n".join([f"## {family.capitalize()}\n", *(re.sub(r"(?m)^(#+) ", r"##\1 ", explain(rule)) for rule in group)])
        for family, group in groupby(sorted(rules, key=lambda rule: (rule.family, rule.code)), lambda rule: rule.family)
    ]
    columns = ("name", "family", "severity", "confidence")
    each = ((rule, [getattr(rule, name) for name in columns], ", ".join(rule.formats)) for rule in rules)
    rows = ((f"[{rule.code}](#{rule.code.lower()}-{rule.name})", *words, formats) for rule, words, formats in each)
    overview = _table(("code", *columns, "formats"), rows)
    allowed = ((kind, ", ".join(f"`{name}`" for name in names)) for kind, names in COMPARISONS.items())
    facts = ((f"`{name}`", fact.type, fact.unit, fact.meaning) for name, fact in FACTS.items())
    tables = _table(("type of fact", "comparisons"), allowed), _table(("fact", "type", "unit", "meaning"), facts)
    return "\n".join([_HEAD, overview, *families, _FACTS_HEAD, *tables])


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    cells = [head, ["---"] * len(head), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    lines = (f"|{'|'.join(row)}|" if row[0] == "---" else f"| {' | '.join(row)} |" for row in cells)
    return "\n".join(lines) + "\n"
