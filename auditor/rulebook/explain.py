"""Renders rules as Markdown or JSON data: one rule, or a page for each family, with an index and the table of facts."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

from .conditions import COMPARISONS, describe
from .facts import FACTS
from .rule import Chain, Example, Match, Rule

_HEAD = """\
# Rules

`make docs` generates this page, and a page for each family of rules, from the files under `rules/`. A rule describes code that often fails in a format, and
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


def pages(rules: Sequence[Rule]) -> dict[str, str]:
    """Markdown by file name: `rules.md`, with a line for every rule and the table of facts, and `rules/FAMILY.md`, with
    all about the rules of one family."""
    families: dict[str, list[Rule]] = {}
    for rule in sorted(rules, key=lambda rule: (rule.family, rule.code)):
        families.setdefault(rule.family, []).append(rule)
    index = [_HEAD]
    result: dict[str, str] = {}
    for family, members in families.items():
        file = f"rules/{family}.md"
        result[file] = _family_page(family, members)
        index.append(_family_table(family, members, file))
    allowed = [(kind, ", ".join(f"`{name}`" for name in names)) for kind, names in COMPARISONS.items()]
    facts = [(f"`{name}`", fact.type, fact.unit, fact.meaning) for name, fact in FACTS.items()]
    index.append(_FACTS_HEAD)
    index.append(_table(("type of fact", "comparisons"), allowed))
    index.append(_table(("fact", "type", "unit", "meaning"), facts))
    return {"rules.md": "\n".join(index), **result}


def _family_page(family: str, rules: Sequence[Rule]) -> str:
    """All about the rules of a family, with every heading of `explain` one level lower."""
    about = [re.sub(r"(?m)^(#+) ", r"#\1 ", explain(rule)) for rule in rules]
    return "\n".join([f"# Rules: {family}\n", "[All rules](../rules.md)\n", *about])


def _family_table(family: str, rules: Sequence[Rule], file: str) -> str:
    """A table with a line for every rule of a family, under a heading; each line leads to the family's page."""
    columns = ("name", "severity", "confidence")
    rows = []
    for rule in rules:
        link = f"[{rule.code}]({file}#{rule.code.lower()}-{rule.name})"
        rows.append((link, *(getattr(rule, name) for name in columns), ", ".join(rule.formats)))
    return f"## {family.capitalize()}\n\n" + _table(("code", *columns, "formats"), rows)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(head)} |", f"|{'|'.join(['---'] * len(head))}|"]
    for row in rows:
        cells = [cell.replace("|", "\\|") for cell in row]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"
