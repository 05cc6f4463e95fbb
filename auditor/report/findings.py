"""Findings ranked, with those that repeat over identical blocks folded into one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..records import Finding, NodeReport
from ..records.audit import Audit
from .ran import tally
from .use import keep_by_hand
from .view import pattern
from .words import SEVERITIES, label, magnitude, percent, ratio

CONFIDENCES = ("high", "medium", "low")


@dataclass(frozen=True)
class FindingGroup:
    """One rule on one line of code, over all blocks that run it. worst: the member whose effect on the outputs is largest; effect: that effect."""

    worst: Finding
    members: tuple[Finding, ...]
    report: NodeReport | None
    pattern: str
    effect: float
    facts: tuple[tuple[str, str], ...]
    agreement: str
    planned: str | None
    snippet: str | None
    cost: str


def ranked(audit: Audit) -> tuple[FindingGroup, ...]:
    """Findings by severity, then by measured effect, then by confidence; the order is the same on every run."""
    reports = {r.node.name: r for r in audit.nodes}
    groups: dict[tuple[str | None, ...], list[Finding]] = {}
    for finding in audit.findings:
        kind = (finding.rule, finding.severity, pattern(finding.owner), finding.op, finding.source)
        groups.setdefault(kind, []).append(finding)
    return tuple(sorted((_group(audit, members, reports) for members in groups.values()), key=_rank))


def _rank(group: FindingGroup) -> tuple[int, float, int, str, str]:
    worst = group.worst
    return (
        _index(SEVERITIES, worst.severity),
        -group.effect,
        _index(CONFIDENCES, worst.confidence),
        worst.rule,
        worst.node,
    )


def _index(order: tuple[str, ...], value: str) -> int:
    return order.index(value) if value in order else len(order)


def _effect(report: NodeReport | None, formats: tuple[str, ...]) -> float:
    if report is None:
        return 0.0
    effects = [report.contributions[f].isolated for f in formats if f in report.contributions]
    return max((math.inf if math.isnan(e) else e for e in effects), default=0.0)


def _group(audit: Audit, members: list[Finding], reports: Mapping[str, NodeReport]) -> FindingGroup:
    effects = [_effect(reports.get(f.node), f.formats) for f in members]
    at = max(range(len(members)), key=lambda i: effects[i])
    worst = members[at]
    report = reports.get(worst.node)
    return FindingGroup(
        worst,
        tuple(members),
        report,
        pattern(worst.owner) if len(members) > 1 else worst.owner,
        effects[at],
        _facts(worst, report),
        _agreement(worst),
        tally(reports[f.node] for f in members if f.node in reports) or None,
        keep_by_hand(worst.owner),
        _cost(audit, members),
    )


def _cost(audit: Audit, members: list[Finding]) -> str:
    """What keeping the modules of a group in FP32 takes out of low precision: the FLOPs of all inside them."""
    total = sum(report.flops for report in audit.nodes)
    owners = tuple(dict.fromkeys(finding.owner for finding in members))
    inside = [r for r in audit.nodes if any(r.node.owner == o or r.node.owner.startswith(f"{o}.") for o in owners if o)]
    if not total or "" in owners:
        return ""
    them = "this module" if len(owners) == 1 else f"these {len(owners):,} modules"
    share = sum(report.flops for report in inside) / total
    what = f"takes {percent(share)} of the FLOPs out of low precision" if share else "costs casts, and no FLOPs"
    return f"Keeping {them} in FP32 {what}."


def _facts(finding: Finding, report: NodeReport | None) -> tuple[tuple[str, str], ...]:
    facts = [(key.replace("_", " ").replace(".", " "), _fact(value)) for key, value in finding.evidence.items()]
    for fmt in finding.formats:
        error = report.errors.get(fmt) if report else None
        contribution = report.contributions.get(fmt) if report else None
        if error is not None and error.unsupported:
            facts.append((f"in {label(fmt)}", "does not run"))
        elif contribution is not None:
            facts.append((f"moves the output, {label(fmt)}", ratio(contribution.isolated)))
        if error is None:
            continue
        if error.overflow or error.nan:
            facts.append((f"non-finite values, {label(fmt)}", f"{error.overflow + error.nan:,}"))
        if error.underflow > 0:
            facts.append((f"flushed to zero, {label(fmt)}", percent(error.underflow)))
    return tuple(facts)


def _fact(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "not known"}[value]
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return magnitude(value)
    if isinstance(value, (list, tuple)):
        return ", ".join(_fact(v) for v in value)
    return str(value)


def _agreement(finding: Finding) -> str:
    return {
        True: "The measurement bears this out.",
        False: "The measurement does not bear this out on these inputs.",
        None: "This was not measured.",
    }[finding.agrees]
