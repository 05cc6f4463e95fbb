"""How severe findings are for the plan that is recommended, and what becomes of them under it."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import replace

from ..formats.table import runs
from ..records import Capture, Finding, Plan
from ..replay.resolve import resolve
from ..replay.strategies import plain, running, scoped
from ..rulebook.rule import SEVERITIES
from .causes import Graph


def followed(plans: Mapping[str, Plan], recommended: str | None) -> Plan | None:
    """The plan that severities speak of: the recommended one, else the fastest that runs something low and holds the
    budget; None where none does."""
    held = [plan for plan in plans.values() if plan.verified and _lowers(plan)]
    return plans[recommended] if recommended else max(held, key=lambda plan: plan.predicted_speedup, default=None)


def about(
    findings: Sequence[Finding], plans: Mapping[str, Plan], recommended: str | None, capture: Capture, graph: Graph
) -> tuple[Finding, ...]:
    """Findings with the severity they have for the plan that is followed.

    An error says that no plan holds the budget. Under a plan that does, what it keeps in FP32, and what would refuse or
    turn non-finite under others, is a warning at most; what else only others meet is one step less severe.
    """
    plan = followed(plans, recommended)
    if plan is None:
        stopped = any(runs(fmt) for fmt in {plan.format for plan in plans.values()})
        return tuple(replace(f, bearing="stops" if stopped and _unsafe(graph, f) else None) for f in findings)
    low = _touched(capture, plan, scoped(plan.scopes))
    met = _touched(capture, plan, plain(plan.format))
    return tuple(_weighed(finding, _bearing(finding, plan, low, met), plan, graph) for finding in findings)


def _lowers(plan: Plan) -> bool:
    return any(choice.precision != "fp32" for choice in plan.scopes.values())


def _touched(capture: Capture, plan: Plan, precision_of: Callable[[str], str]) -> frozenset[str]:
    """Nodes that are low, or read something low, when the plan's strategy runs the model so."""
    found = resolve(capture, running(capture, plan.strategy, precision_of, plan.format))
    return frozenset(name for name in capture.nodes if found.touches_low(name))


def _bearing(finding: Finding, plan: Plan, low: Container[str], met: Container[str]) -> str | None:
    if not finding.node:
        return None
    if plan.format not in finding.formats or finding.node not in met:
        return "elsewhere"
    return "low" if finding.node in low else "kept"


def _weighed(finding: Finding, bearing: str | None, plan: Plan, graph: Graph) -> Finding:
    spoken = replace(finding, plan=plan.name, bearing=bearing)
    if bearing is None or (bearing == "low" and not finding.measurable):
        return spoken
    breaks = any(graph.broken(finding.node, fmt) for fmt in finding.formats) and _unsafe(graph, finding)
    if bearing == "kept" or (bearing == "elsewhere" and breaks):
        return replace(spoken, severity=_at_most(finding.severity, "warning"))
    return replace(spoken, severity=SEVERITIES[max(SEVERITIES.index(finding.severity) - 1, 0)])


def _unsafe(graph: Graph, finding: Finding) -> bool:
    verdicts = graph.verdicts.get(finding.node, {})
    return any(fmt in verdicts and verdicts[fmt].verdict == "unsafe" for fmt in finding.formats)


def _at_most(severity: str, most: str) -> str:
    return min(severity, most, key=SEVERITIES.index)
