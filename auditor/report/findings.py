"""Findings gathered by root cause, ranked, with what the plan that is followed makes of them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ..artefact.strategies import strategy_of
from ..paths import pattern, place, within
from ..records import Finding, NodeReport, Plan
from ..records.audit import Audit
from ..records.measure import MEASURED
from .kept import tally
from .use import keep_alone
from .words import SEVERITIES, count, label, listed, percent, plan_title, scope

CONFIDENCES = ("high", "medium", "low")
MODULES_NAMED = 3


@dataclass(frozen=True)
class Cause:
    """Findings that begin at one operation of one line, in every module that runs it: `members`.

    rules: members by rule, in each the one first that moves the outputs most, and those of the rule first that says best
    what is wrong.
    """

    audit: Audit
    members: tuple[Finding, ...]
    rules: Mapping[str, Sequence[Finding]]
    report: NodeReport | None
    effect: float

    @property
    def severity(self) -> str:
        """The highest of its findings."""
        return min((finding.severity for finding in self.members), key=SEVERITIES.index)

    @property
    def worst(self) -> Finding:
        """The finding that says best what is wrong; `report` is of its operation."""
        return next(iter(self.rules.values()))[0]

    @property
    def formats(self) -> tuple[str, ...]:
        """Formats that any of its findings is about."""
        return tuple(dict.fromkeys(fmt for finding in self.members for fmt in finding.formats))

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
        return f"{count(len(self.members), 'finding')}: {', '.join(self.rules)}"

    @property
    def agreement(self) -> str:
        """Whether the measurement bears it out."""
        return AGREEMENT[self.worst.agrees]

    @property
    def planned(self) -> str:
        """What its operations compute in under the recommended plan."""
        names = {finding.node for finding in self.members}
        return tally(report for report in self.audit.nodes if report.node.name in names)

    @property
    def snippet(self) -> str | None:
        """Code that keeps its module in FP32, and nothing else."""
        return keep_alone(self.audit, self.worst.owner)

    @cached_property
    def bearing(self) -> str:
        """What becomes of its operations under the plan that is followed."""
        return _bearing(self.audit, [finding for finding in self.members if finding.bearing])

    @property
    def cost(self) -> str:
        """What keeping its modules in FP32 takes out of low precision: the FLOPs of all inside them."""
        total = sum(report.flops for report in self.audit.nodes)
        owners = {finding.owner for finding in self.members}
        if not total or "" in owners:
            return ""
        inside = (r.flops for r in self.audit.nodes if any(within(r.node.owner, owner) for owner in owners))
        share = sum(inside) / total
        what = f"takes {percent(share)} of the FLOPs out of low precision" if share else "only adds dtype conversions"
        return f"Keeping {'this module' if len(owners) == 1 else f'these {len(owners):,} modules'} in FP32 {what}."


@dataclass(frozen=True)
class Causes:
    """All causes, ranked: those to fix, which are errors and warnings, and notes. about: of which plan severities speak."""

    wanting: tuple[Cause, ...]
    notes: tuple[Cause, ...]
    about: str

    @property
    def all(self) -> tuple[Cause, ...]:
        """Every cause, the worst first."""
        return self.wanting + self.notes

    @property
    def headline(self) -> str:
        """How many there are."""
        said = count(len(self.notes), "note")
        if not self.wanting:
            return f"nothing to fix, {said}" if self.notes else "nothing to fix: no rule fired"
        kinds = Counter(cause.severity for cause in self.wanting)
        counts = [count(kinds[severity], severity) for severity in SEVERITIES if kinds[severity]]
        return f"{count(len(self.wanting), 'cause')} ({', '.join(counts)})" + (f", {said}" if self.notes else "")


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
    return Causes(wanting, tuple(cause for cause in found if cause.severity == "info"), _about(audit))


def _cause(audit: Audit, members: list[Finding], reports: Mapping[str, NodeReport]) -> Cause:
    effects = {id(f): _effect(reports.get(f.node), f.formats) for f in members}
    rules: dict[str, list[Finding]] = {}
    for finding in sorted(members, key=lambda f: (_weight(f), not _begins(f), -effects[id(f)])):
        rules.setdefault(finding.rule, []).append(finding)
    worst = next(iter(rules.values()))[0]
    return Cause(audit, tuple(members), rules, reports.get(worst.node), max(effects.values()))


def _weight(finding: Finding) -> tuple[bool, int, bool, int]:
    """What says best what is wrong: what is borne out, then how severe it is here, rules before the measurement alone, then
    how severe it is in its file."""
    declared = SEVERITIES.index(finding.declared or finding.severity)
    return finding.agrees is False, SEVERITIES.index(finding.severity), finding.rule in MEASURED, declared


def _begins(finding: Finding) -> bool:
    """Whether its operation is the one that the cause goes by."""
    where = place(finding.source, finding.owner, finding.op)
    return finding.cause in (where, f"{where}: precision")


def _rank(cause: Cause) -> tuple[int, int, bool, float, int, str, str]:
    worst = cause.worst
    return (
        SEVERITIES.index(cause.severity),
        SEVERITIES.index(worst.declared or worst.severity),
        worst.rule in MEASURED,
        -cause.effect,
        CONFIDENCES.index(worst.confidence),
        worst.rule,
        worst.node,
    )


def _effect(report: NodeReport | None, formats: tuple[str, ...]) -> float:
    """How far an operation alone in low precision moves the outputs, in the format where that is most."""
    moved = [report.contributions[f].isolated for f in formats if f in report.contributions] if report else []
    return max((math.inf if math.isnan(effect) else effect for effect in moved), default=0.0)


def _about(audit: Audit) -> str:
    """Which plan severities speak of, in a sentence."""
    plan = audit.plans.get(next((f.plan for f in audit.findings if f.plan), ""))
    if plan is not None:
        return f"Severities are for {_followed(audit, plan)}."
    if any(finding.bearing == "stops" for finding in audit.findings):
        return "No plan that holds the budget runs anything low: severities are those of the rules."
    return ""


def _followed(audit: Audit, plan: Plan) -> str:
    role = "recommended plan" if plan.name == audit.recommended else "fastest plan that holds the budget"
    return f"{plan_title(plan)}, the {role}"


BEARINGS = {
    "kept": "keeps {} in FP32",
    "low": "runs {} low and holds the budget",
    "reads": "runs {} in FP32, on values that are low, and holds the budget",
}


def _bearing(audit: Audit, spoken: Sequence[Finding]) -> str:
    """What the plan that is followed makes of operations with findings."""
    plan = audit.plans.get(spoken[0].plan or "") if spoken else None
    if plan is None:
        stops = spoken and spoken[0].bearing == "stops"
        return "No plan that holds the budget runs anything low, and this is part of why." if stops else ""
    nodes = {how: {f.node for f in spoken if f.bearing == how} for how in BEARINGS}
    every = {finding.node for finding in spoken}
    said = [text.format(_these(nodes[how], every)) for how, text in BEARINGS.items() if nodes[how]]
    if others := every.difference(*nodes.values()):
        here = (finding for finding in spoken if finding.node in others)
        met = dict.fromkeys((f, how) for finding in here for f, by in finding.met.items() for how in by)
        under = " or ".join(f"{label(fmt)} {strategy_of(how).title}" for fmt, how in met)
        what = "this" if others == every else f"what {_these(others, every)} would do"
        said.append(f"avoids {what}{f', which only occurs in {under}' if under else ''}")
    return f"{_followed(audit, plan)}, {'; '.join(said)}."


def _these(nodes: Collection[str], every: Collection[str]) -> str:
    if len(nodes) < len(every):
        return f"{len(nodes):,} of these operations"
    return "the operation" if len(every) == 1 else f"all {len(every):,} operations"


AGREEMENT = {
    True: "The measurement confirms this.",
    False: "The measurement does not confirm this on these inputs.",
    None: "This was not measured.",
}
