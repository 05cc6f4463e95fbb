"""Findings gathered by root cause, ranked, with what the plan that is followed makes of them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..artefact.strategies import strategy_of
from ..numerics.formats import FORMATS
from ..paths import pattern, place, within
from ..records import Finding, NodeReport
from ..records.audit import Audit
from ..records.measure import MEASURED
from .kept import tally
from .use import keep_by_hand
from .words import SEVERITIES, count, label, listed, magnitude, percent, plan_title, ratio, scope

CONFIDENCES = ("high", "medium", "low")
MODULES_NAMED = 3


@dataclass(frozen=True)
class Kind:
    """What one rule says in a cause: of its most severe findings the one that moves the outputs most, and how many it has."""

    worst: Finding
    times: int


@dataclass(frozen=True)
class Cause:
    """Findings that begin at one operation of one line, in every module that runs it.

    severity: the highest of them. worst: the one that says best what is wrong; report: of its operation. rules: one Kind
    each, that of `worst` first. effect: the largest on the outputs.
    """

    severity: str
    worst: Finding
    members: tuple[Finding, ...]
    rules: tuple[Kind, ...]
    formats: tuple[str, ...]
    report: NodeReport | None
    effect: float
    facts: tuple[tuple[str, str], ...]
    agreement: str
    around: str
    bearing: str
    planned: str | None
    snippet: str | None
    cost: str

    @property
    def where(self) -> str:
        """The modules in words: `layers.{0-2}.attn, layers.{1,3}.mlp and 2 more modules`."""
        return listed(list(dict.fromkeys(finding.owner for finding in self.members)), MODULES_NAMED)

    @property
    def shapes(self) -> tuple[str, ...]:
        """Its modules with their block numbers blanked: `layers.*.attn`."""
        return tuple(dict.fromkeys(scope(pattern(finding.owner)) for finding in self.members))

    @property
    def operations(self) -> int:
        """How many operations there are findings on."""
        return len({finding.node for finding in self.members})

    @property
    def size(self) -> str:
        """How much there is in it, in a clause: `6 findings: ACT006, CON002`; nothing where it is one."""
        if len(self.members) == 1:
            return ""
        found = f"{count(len(self.members), 'finding')}: {', '.join(self.codes)}"
        return f"{found}; {self.around}" if self.around else found

    @property
    def codes(self) -> tuple[str, ...]:
        """Codes of its rules."""
        return tuple(kind.worst.rule for kind in self.rules)


@dataclass(frozen=True)
class Causes:
    """All causes, ranked: those to fix, which are errors and warnings, and notes."""

    wanting: tuple[Cause, ...]
    notes: tuple[Cause, ...]
    headline: str
    about: str

    @property
    def all(self) -> tuple[Cause, ...]:
        """Every cause, the worst first."""
        return self.wanting + self.notes


def causes(audit: Audit) -> Causes:
    """Causes by severity, then by that of their rules' files, rules before the measurement alone, then by effect; the
    order is the same on every run."""
    reports = {r.node.name: r for r in audit.nodes}
    groups: dict[Any, list[Finding]] = {}
    for finding in audit.findings:
        alone = (finding.rule, finding.severity, pattern(finding.owner), finding.op, finding.source)
        groups.setdefault(finding.cause or alone, []).append(finding)
    found = sorted((_cause(audit, members, reports) for members in groups.values()), key=_rank)
    wanting = tuple(cause for cause in found if cause.severity != "info")
    notes = tuple(cause for cause in found if cause.severity == "info")
    return Causes(wanting, notes, _headline(wanting, notes), _about(audit))


def _headline(wanting: Sequence[Cause], notes: Sequence[Cause]) -> str:
    said = count(len(notes), "note")
    if not wanting:
        return f"nothing to fix, {said}" if notes else "nothing to fix: no rule fired"
    kinds = Counter(cause.severity for cause in wanting)
    counts = [count(kinds[severity], severity) for severity in SEVERITIES if kinds[severity]]
    return f"{count(len(wanting), 'cause')} ({', '.join(counts)})" + (f", {said}" if notes else "")


def _about(audit: Audit) -> str:
    """Which plan severities speak of, in a sentence."""
    plan = audit.plans.get(next((f.plan for f in audit.findings if f.plan), ""))
    if plan is not None:
        return f"Severities are for {plan_title(plan)}, {_role(audit, plan.name)}."
    if any(finding.bearing == "stops" for finding in audit.findings):
        return "No plan that holds the budget runs anything low: severities are those of the rules."
    return ""


def _role(audit: Audit, name: str) -> str:
    return "the recommended plan" if name == audit.recommended else "the fastest plan that holds the budget"


def _rank(cause: Cause) -> tuple[int, int, bool, float, int, str, str]:
    worst = cause.worst
    return (
        _index(SEVERITIES, cause.severity),
        _index(SEVERITIES, worst.declared or worst.severity),
        worst.rule in MEASURED,
        -cause.effect,
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


def _cause(audit: Audit, members: list[Finding], reports: Mapping[str, NodeReport]) -> Cause:
    effects = {id(f): _effect(reports.get(f.node), f.formats) for f in members}
    kinds: dict[str, list[Finding]] = {}
    for finding in sorted(members, key=lambda f: (_weight(f), not _begins(f), -effects[id(f)])):
        kinds.setdefault(finding.rule, []).append(finding)
    rules = tuple(Kind(same[0], len(same)) for same in kinds.values())
    worst = rules[0].worst
    report = reports.get(worst.node)
    return Cause(
        min((f.severity for f in members), key=lambda severity: _index(SEVERITIES, severity)),
        worst,
        tuple(members),
        rules,
        tuple(dict.fromkeys(fmt for finding in members for fmt in finding.formats)),
        report,
        max(effects.values()),
        _facts(worst, report, min(audit.formats, key=lambda name: FORMATS[name].largest, default=None)),
        AGREEMENT[worst.agrees],
        _around(worst, members),
        _bearing(audit, members),
        tally(reports[name] for name in dict.fromkeys(f.node for f in members) if name in reports) or None,
        keep_by_hand(audit, worst.owner),
        _cost(audit, members),
    )


def _weight(finding: Finding) -> tuple[bool, int, bool, int]:
    """What says best what is wrong: what is borne out, then how severe it is here, rules before the measurement alone, then
    how severe it is in its file."""
    declared = _index(SEVERITIES, finding.declared or finding.severity)
    return finding.agrees is False, _index(SEVERITIES, finding.severity), finding.rule in MEASURED, declared


def _begins(finding: Finding) -> bool:
    """Whether its operation is the one that the cause goes by."""
    where = place(finding.source, finding.owner, finding.op)
    return finding.cause in (where, f"{where}: precision")


def _around(worst: Finding, members: Sequence[Finding]) -> str:
    """What the measurement alone adds to what a rule says, in a clause."""
    if worst.rule in MEASURED:
        return ""
    alone: dict[str, set[str]] = {}
    for finding in members:
        if finding.rule in MEASURED:
            alone.setdefault(finding.formats[0], set()).add(finding.node)
    found = [f"{count(len(nodes), 'operation')} in {label(fmt)}" for fmt, nodes in alone.items()]
    return f"with it unsafe: {', '.join(found)}" if found else ""


def _bearing(audit: Audit, members: Sequence[Finding]) -> str:
    """What becomes of the operations under the plan that is followed."""
    spoken = [finding for finding in members if finding.bearing]
    if not spoken:
        return ""
    if spoken[0].bearing == "stops":
        return "No plan that holds the budget runs anything low, and this is part of why."
    plan = audit.plans.get(spoken[0].plan or "")
    if plan is None:
        return ""
    nodes = {how: {f.node for f in spoken if f.bearing == how} for how in ("kept", "low", "reads", "elsewhere")}
    others = nodes["elsewhere"] - nodes["kept"] - nodes["low"] - nodes["reads"]
    total = len(set.union(*nodes.values()))
    said = [f"keeps {_these(nodes['kept'], total)} in FP32"] if nodes["kept"] else []
    if nodes["low"]:
        said.append(f"runs {_these(nodes['low'], total)} low and holds the budget")
    if nodes["reads"]:
        said.append(f"runs {_these(nodes['reads'], total)} in FP32, on values that are low, and holds the budget")
    if others:
        met = _met(spoken, others)
        what = "this" if len(others) == len({f.node for f in spoken}) else f"what {_these(others, total)} would do"
        said.append(f"is spared {what}{f', which only occurs in {met}' if met else ''}")
    return f"{plan_title(plan)}, {_role(audit, plan.name)}, {'; '.join(said)}."


def _these(nodes: Collection[str], total: int) -> str:
    if len(nodes) == total:
        return "the operation" if total == 1 else f"all {total:,} operations"
    return f"{len(nodes):,} of these operations"


def _met(spoken: Sequence[Finding], nodes: Collection[str]) -> str:
    """Under which strategies the operations run in a format that is spoken of, where all of the model does."""
    met = ((fmt, how) for finding in spoken if finding.node in nodes for fmt, by in finding.met.items() for how in by)
    return " or ".join(dict.fromkeys(f"{label(fmt)} {strategy_of(how).title}" for fmt, how in met))


def _cost(audit: Audit, members: Sequence[Finding]) -> str:
    """What keeping the modules of a group in FP32 takes out of low precision: the FLOPs of all inside them."""
    total = sum(report.flops for report in audit.nodes)
    owners = tuple(dict.fromkeys(finding.owner for finding in members))
    if not total or "" in owners:
        return ""
    inside = [r for r in audit.nodes if any(within(r.node.owner, owner) for owner in owners)]
    them = "this module" if len(owners) == 1 else f"these {len(owners):,} modules"
    share = sum(report.flops for report in inside) / total
    what = f"takes {percent(share)} of the FLOPs out of low precision" if share else "only adds dtype conversions"
    return f"Keeping {them} in FP32 {what}."


AGREEMENT = {
    True: "The measurement bears this out.",
    False: "The measurement does not bear this out on these inputs.",
    None: "This was not measured.",
}
_MOVES = {
    "first-order": "predicted to move the output",
    "group": "moves the output, low together with others",
    "not-run": "not run; predicted to move the output",
}


def _facts(finding: Finding, report: NodeReport | None, narrow: str | None) -> tuple[tuple[str, str], ...]:
    """What a rule read, then what was measured of the operation. narrow: the format in which ranges hurt first."""
    facts = [(key.replace("_", " ").replace(".", " "), _fact(value)) for key, value in finding.evidence.items()]
    if report is None:
        return tuple(facts)
    for fmt in finding.formats:
        error, contribution = report.errors.get(fmt), report.contributions.get(fmt)
        if error is not None and error.unsupported:
            facts.append((f"in {label(fmt)}", "does not run"))
        elif contribution is not None:
            moves = _MOVES.get(contribution.decided_by, "moves the output")
            facts.append((f"{moves}, {label(fmt)}", ratio(contribution.isolated)))
        if error is not None and (error.overflow or error.nan):
            facts.append((f"non-finite values, {label(fmt)}", f"{error.overflow + error.nan:,}"))
        if error is not None and error.underflow > 0:
            facts.append((f"flushed to zero, {label(fmt)}", percent(error.underflow)))
    if report.range:
        largest = report.range.max_abs
        if largest not in finding.evidence.values():
            facts.append(("largest |x|", magnitude(largest)))
        if narrow:
            bits = FORMATS[narrow].headroom_bits(largest)
            room = f"{bits:.1f} bits" if bits >= 0 else f"past it by {-bits:.1f} bits"
            facts.append((f"headroom to {magnitude(FORMATS[narrow].largest)} ({label(narrow)})", room))
    return tuple(facts)


def _fact(value: Any) -> str:
    match value:
        case bool() | None:
            return {True: "yes", False: "no", None: "not known"}[value]
        case int():
            return f"{value:,}"
        case float():
            return magnitude(value)
        case list() | tuple():
            return ", ".join(map(_fact, value))
    return str(value)
