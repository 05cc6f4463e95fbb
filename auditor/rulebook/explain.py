"""A rule in words and as plain data, from its file alone."""

from __future__ import annotations

import textwrap
from typing import Any

from .conditions import describe
from .rule import Chain, Example, Match, Rule


def as_data(rule: Rule) -> dict[str, Any]:
    """The rule as JSON holds it; where it looks and on which condition it fires are in words."""
    fields = ("code", "name", "family", "since", "status", "severity", "confidence", "formats", "supersedes")
    texts = ("message", "why", "advice", "references")
    return {
        **{name: getattr(rule, name) for name in fields},
        "looks_for": _places(rule.match),
        "fires_where": describe(rule.when),
        **{name: getattr(rule, name) for name in texts},
        "example": vars(rule.example) if rule.example else None,
    }


def explain(rule: Rule) -> str:
    """Markdown about one rule: why it hurts, an example, what to do, then what is matched, and its sources."""
    condition = describe(rule.when)
    sections = [
        f"# {rule.code}: {rule.name}",
        f"Severity: {rule.severity}. Confidence: {_confidence(rule)}. Formats: {', '.join(rule.formats)}. "
        f"Family: {rule.family}. Since {rule.since} ({rule.status}).",
        "## Why",
        rule.why,
        *(_example(rule.example) if rule.example else []),
        "## What to do",
        rule.advice,
        *(_repaired(rule.example) if rule.example and rule.example.fixed else []),
        "## What it looks for",
        "\n".join(f"- {line}" for line in _places(rule.match))
        + (f"\n\nIt fires where {condition}." if condition else "")
        + _superseded(rule),
        "## References",
        "\n".join(f"- {reference}" for reference in rule.references),
    ]
    return "\n\n".join(sections) + "\n"


def _confidence(rule: Rule) -> str:
    if rule.confidence == "high" or not rule.measurable:
        return rule.confidence
    return f"{rule.confidence}, and high where the operation is measured to be unsafe"


def _superseded(rule: Rule) -> str:
    if not rule.supersedes:
        return ""
    return f"\n\nWhere it fires, {', '.join(rule.supersedes)} say nothing, and it is as severe as the severest of them."


def _example(example: Example) -> list[str]:
    called = ", ".join(f"`{item}`" for item in example.inputs)
    return ["## Example", "It fires on", _indented(example.code), *([f"called with {called}."] if called else [])]


def _repaired(example: Example) -> list[str]:
    changed = [f"In FP32 this is not the same function: {example.changes}"] if example.changes else []
    return ["The example, repaired:", _indented(example.fixed), *changed]


def _indented(code: str) -> str:
    return textwrap.indent(code, "    ")


def _places(match: Match) -> list[str]:
    places = []
    if match.ops:
        places.append("operations: " + ", ".join(f"`{op}`" for op in match.ops))
    if match.position:
        places.append(f"position: {match.position} layer with weights")
    if match.owner_type:
        places.append(f"modules of class `{match.owner_type}`")
    return places + [_drawing(chain, match) for chain in match.chains]


def _drawing(chain: Chain, match: Match) -> str:
    names = dict.fromkeys(name.rstrip("?") for path in chain.drawn for name in path)
    nodes = "; ".join(
        f"{name} is {' or '.join(f'`{op}`' for op in match.nodes[name].ops)}"
        for name in names
        if match.nodes[name].ops != ("*",)
    )
    paths = " and ".join(f"`{path}`" for path in chain.paths)
    return f"operations in a chain, reshapes and casts left out: {paths}, where {nodes} (`?`: may be missing)"
