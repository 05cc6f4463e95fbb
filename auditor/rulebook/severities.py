"""How severe findings are for the plan that is recommended, and what becomes of them under it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from ..artefact.strategies import names
from ..execution.policy import Policy, plain, scoped
from ..execution.resolve import Resolution, is_low, resolve
from ..numerics.formats import runs
from ..records import Capture, Finding, Plan
from .causes import Graph
from .rule import SEVERITIES


@dataclass(frozen=True)
class _Uses:
    """What operations do with low values when the model runs so. computing: nodes that compute low; reading: others that
    are handed what was low, whether or not it is raised for them."""

    computing: frozenset[str]
    reading: frozenset[str]

    @classmethod
    def of(cls, capture: Capture, strategy: str, precision_of: Callable[[str], str], format: str) -> _Uses:
        found = resolve(Policy(capture, strategy, precision_of, format))
        computing = frozenset(name for name in capture.nodes if _computes_low(found, name))
        reading = (name for name, node in capture.nodes.items() if any(found.low(source) for source in node.inputs))
        return cls(computing, frozenset(reading) | found.reads_low)

    @classmethod
    def by_operation(cls, capture: Capture, kept: Collection[str]) -> _Uses:
        """Of a program: what it does not keep in FP32 is low where it computes with floating values at all."""
        floating = {name for name, node in capture.nodes.items() if node.floating}
        floating |= {place.name for place in capture.placeholders}
        nodes = capture.nodes.items()
        computing = {name for name, node in nodes if node.floating or floating.intersection(node.inputs)} - set(kept)
        return cls(frozenset(computing), frozenset(n for n, node in nodes if computing.intersection(node.inputs)))


def _computes_low(found: Resolution, name: str) -> bool:
    """Whether its kernel gives a low value; of one that gives no real numbers, whether it takes one."""
    gives = found.computed(name)
    return found.low(name) or is_low(gives) or (not gives and name in found.reads_low)


def followed(plans: Mapping[str, Plan], recommended: str | None) -> Plan | None:
    """The plan that severities speak of: the recommended one, else the fastest that runs something low and holds the
    budget; None where none does."""
    held = [plan for plan in plans.values() if plan.holds and _lowers(plan)]
    held = [plan for plan in held if plan.program is None] or held
    return plans[recommended] if recommended else max(held, key=lambda plan: plan.predicted_speedup, default=None)


def about(
    findings: Sequence[Finding], plans: Mapping[str, Plan], recommended: str | None, capture: Capture, graph: Graph
) -> tuple[Finding, ...]:
    """Findings with the severity they have for the plan that is followed.

    An error says that no plan holds the budget. Under a plan that does, what it keeps in FP32, and what would refuse or
    turn non-finite under others, is a warning at most; what else only others meet is one step less severe.
    """
    findings = _met(findings, capture, graph)
    plan = followed(plans, recommended)
    if plan is None:
        stopped = any(runs(fmt) for fmt in {plan.format for plan in plans.values()})
        return tuple(replace(f, bearing="stops" if stopped and _unsafe(graph, f) else None) for f in findings)
    if plan.program is not None:
        kept = {operation.node for operation in plan.program.kept if operation.node}
        under, plainly = _Uses.by_operation(capture, kept), _Uses.by_operation(capture, ())
    else:
        under = _Uses.of(capture, plan.strategy, scoped(plan.scopes), plan.format)
        plainly = _Uses.of(capture, plan.strategy, plain(plan.format), plan.format)
    return tuple(_weighed(finding, _bearing(finding, plan, under, plainly, graph), plan, graph) for finding in findings)


def _lowers(plan: Plan) -> bool:
    return any(choice.precision != "fp32" for choice in plan.scopes.values())


def _met(findings: Sequence[Finding], capture: Capture, graph: Graph) -> tuple[Finding, ...]:
    """Findings with the strategies under which, with all of the model low, their operations compute low."""
    formats = {fmt for verdicts in graph.verdicts.values() for fmt in verdicts}
    spoken = dict.fromkeys(fmt for finding in findings for fmt in finding.formats if fmt in formats)
    uses = {fmt: {name: _Uses.of(capture, name, plain(fmt), fmt) for name in names()} for fmt in spoken}

    def met(finding: Finding) -> dict[str, tuple[str, ...]]:
        found = {}
        for fmt in finding.formats:
            computing = (name for name, use in uses.get(fmt, {}).items() if finding.node in use.computing)
            found[fmt] = tuple(computing)
        return {fmt: strategies for fmt, strategies in found.items() if strategies}

    return tuple(replace(finding, met=met(finding)) for finding in findings)


def _bearing(finding: Finding, plan: Plan, under: _Uses, plainly: _Uses, graph: Graph) -> str | None:
    if not finding.node:
        return None
    if plan.format not in finding.formats:
        return "elsewhere"
    if finding.node in under.computing:
        return "low"
    if finding.node in plainly.computing:
        return "kept"
    if finding.node in under.reading:  # in FP32 it refuses nothing, and what is finite stays so, however it was rounded
        return "elsewhere" if graph.broken(finding.node, plan.format) else "reads"
    return "kept" if finding.node in plainly.reading else "elsewhere"


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
