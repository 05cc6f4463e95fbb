"""A rule in words, from its file alone."""

from __future__ import annotations

from .conditions import describe
from .rule import Chain, Match, Rule


def explain(rule: Rule) -> str:
    """Markdown about one rule: what it looks for, why that hurts, what to do."""
    condition = describe(rule.when)
    sections = [
        f"# {rule.code}: {rule.name}",
        f"Severity: {rule.severity}. Confidence: {rule.confidence}. Formats: {', '.join(rule.formats)}. "
        f"Family: {rule.family}. Since {rule.since} ({rule.status}).",
        "## What it looks for",
        "\n".join(f"- {line}" for line in _places(rule.match))
        + (f"\n\nIt fires where {condition}." if condition else ""),
        "## Why",
        rule.why,
        "## What to do",
        rule.advice,
        "## References",
        "\n".join(f"- {reference}" for reference in rule.references),
    ]
    return "\n\n".join(sections) + "\n"


def _places(match: Match) -> list[str]:
    places = []
    if match.ops:
        places.append("operations: " + ", ".join(f"`{op}`" for op in match.ops))
    if match.position:
        places.append(f"position: {match.position} layer with weights")
    if match.owner_type:
        places.append(f"modules of class `{match.owner_type}`")
    widest: dict[tuple[str, ...], Chain] = {}
    for chain in match.chains:
        if len(chain.nodes) > len(widest.setdefault(chain.paths, chain).nodes):
            widest[chain.paths] = chain
    return places + [_drawing(chain) for chain in widest.values()]


def _drawing(chain: Chain) -> str:
    nodes = "; ".join(
        f"{name} is {' or '.join(f'`{op}`' for op in node.ops)}"
        for name, node in chain.nodes.items()
        if node.ops != ("*",)
    )
    paths = " and ".join(f"`{path}`" for path in chain.paths)
    return f"operations in a chain, reshapes and casts left out: {paths}, where {nodes} (`?`: may be missing)"
