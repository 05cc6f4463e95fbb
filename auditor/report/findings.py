"""Groups findings by root cause, ranks the causes, and says what a plan does about each cause."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ..artefact.strategies import plan_title, strategy_of
from ..records import Finding, NodeReport, Plan, Repair, Verification
from ..records.audit import Audit
from ..records.measure import FAILURES, MEASURED
from ..records.paths import pattern, place_of, within
from .fixes import fixes_of
from .kept import keep_alone, tally
from .words import SEVERITIES, count, label, line, list_paths, percent, scope

INPUTS = "INP"
"""Prefix of the rules about the range of the model's inputs."""
CONSTANTS = "CON"
"""Prefix of the rules about constants in the model's code."""
CONFIDENCES = ("high", "medium", "low")
MODULES_NAMED = 3


class Cause:
    """Findings (`members`) with one root cause: an operation of one source line, in every module that runs this line.

    rules: {rule code: its findings}, the most important code and finding first. worst: the first finding of the first
    code; report: measurements of the operation. where: modules in words; shapes: module paths without block numbers.
    size: the number of findings in words, "" for a single finding. planned_dtypes: the formats in which the operations
    compute under the recommended plan, in words.
    """

    def __init__(self, audit: Audit, members: Sequence[Finding], reports: Mapping[str, NodeReport]) -> None:
        self._audit = audit
        self.members = members
        self._reports = reports
        effects = {id(f): _effect(reports.get(f.node), f.formats) for f in members}

        def weight(f: Finding) -> tuple[Any, ...]:
            """Sort key of findings: contradicted by measurement last; then by severity; rules before measurements."""
            where = place_of(f)
            is_input = f.rule.startswith(INPUTS)  # whose cause is no operation
            return (
                f.agrees is False,
                SEVERITIES.index(f.severity),
                f.rule in MEASURED,
                SEVERITIES.index(f.declared or f.severity),
                not is_input and f.cause not in (where, f"{where}: precision"),  # whether it is caused elsewhere
                -effects[id(f)],
            )

        self.rules: dict[str, list[Finding]] = {}
        for finding in sorted(members, key=weight):
            self.rules.setdefault(finding.rule, []).append(finding)
        of_first_rule = next(iter(self.rules.values()))
        self.worst = of_first_rule[0]
        self.effect = max(effects.values())
        self.report = reports.get(self.worst.node)
        self.severity = min((finding.severity for finding in members), key=SEVERITIES.index)
        self.formats = tuple(dict.fromkeys(fmt for finding in members for fmt in finding.formats))
        self.owners = list(dict.fromkeys(finding.owner for finding in (self.worst, *members)))
        self.where = "the settings"
        if self.worst.op != "auditor.ignore":
            self.where = list_paths(self.owners, MODULES_NAMED)
        self.shapes = tuple(dict.fromkeys(scope(pattern(owner)) for owner in self.owners))
        nodes = dict.fromkeys(finding.node for finding in members)
        self.operations = len(nodes)
        self.planned_dtypes = tally(reports[name] for name in nodes if name in reports)
        self.size = ""
        if len(members) > 1:
            self.size = f"{count(len(members), 'finding')}: {', '.join(self.rules)}"
        self.agreement = AGREEMENT[self.worst.agrees]
        self.snippet = keep_alone(audit, self.worst.owner)
        self.fixes = fixes_of(audit, members)
        self._repairs = [repair for repair in audit.repairs if self.worst.cause in repair.causes]

    @property
    def other_lines(self) -> tuple[str, ...]:
        """The source lines of the findings at other lines than the first finding's, in words."""
        lines = dict.fromkeys(line(finding.source, finding.called_from) for finding in self.members)
        first = line(self.worst.source, self.worst.called_from)
        return tuple(each for each in lines if each and each != first)

    @property
    def is_contradicted(self) -> bool:
        """Whether the measurement contradicts every finding of the cause."""
        return all(finding.agrees is False for finding in self.members)

    @property
    def is_refuted(self) -> bool:
        """Whether it is a note that the measurement contradicts."""
        return self.severity == "info" and self.is_contradicted

    @property
    def overflowing(self) -> tuple[Finding, str] | None:
        """The first finding whose operation turns finite values into Inf, and the format; None without one. Constants, such
        as a mask's, do not count."""
        for finding in self.members:
            if finding.rule.startswith(CONSTANTS) or finding.node not in self._reports:
                continue
            errors = self._reports[finding.node].errors
            for fmt in finding.formats:
                if fmt in errors and errors[fmt].overflow:
                    return finding, fmt
        return None

    @property
    def rank(self) -> tuple[int, bool, float, int, bool, float, int, str, str]:
        """Sort key among causes: the smallest comes first."""
        worst = self.worst
        return (
            SEVERITIES.index(self.severity),
            self.is_avoided,
            -self.gain,
            SEVERITIES.index(worst.declared or worst.severity),
            worst.rule in MEASURED,
            -self.effect,
            CONFIDENCES.index(worst.confidence),
            worst.rule,
            worst.node,
        )

    @property
    def gain(self) -> float:
        """Time under the recommended plan as a multiple of the predicted time after the repair, alone or with other
        causes; 1 if the repair gains nothing."""
        return max((repair.gain for repair in self._repairs), default=1.0)

    @property
    def is_repaired_first(self) -> bool:
        """Whether no plan is recommended, and this cause is part of the repair that gains most."""
        best = self._audit.repairs[:1] if self._audit.recommended is None else ()
        return any(repair in self._repairs for repair in best)

    @property
    def gain_words(self) -> str:
        """A sentence on the predicted plan after the repair; "" if the repair gains nothing."""
        if not self._repairs:
            return ""
        fewest = min(self._repairs, key=lambda repair: len(repair.causes))
        others = len(fewest.causes) - 1
        which = f"Repaired together with {count(others, 'other problem')}" if others else "Once repaired"
        return f"{which}, {repair_words(self._audit, fewest)}."

    @cached_property
    def plan_effect(self) -> str:
        """A sentence on the precision of the cause's operations under the plan to which severities refer."""
        rated = [finding for finding in self.members if finding.bearing]
        if not rated:
            return ""
        plan = self._audit.plans.get(rated[0].plan or "")
        if plan is None:
            is_reason = rated[0].bearing == "stops"
            return "No plan uses low precision; this operation is one reason." if is_reason else ""
        nodes = {how: {f.node for f in rated if f.bearing == how} for how in BEARINGS}
        every = {finding.node for finding in rated}
        kept = [self._reports[name] for name in nodes["kept"] if name in self._reports]  # the rest are inputs
        scopes = [plan.scopes.get(report.node.owner) for report in kept]
        output = ""
        if any(scope.fp32_output for scope in scopes if scope):
            output = " (or only the output)"
        clauses = [text.format(_these(nodes[how], every), output) for how, text in BEARINGS.items() if nodes[how]]
        others = every.difference(*nodes.values())
        if others:
            what = "the problem" if others == every else f"the problem of {_these(others, every)}"
            clauses.append(f"avoids {what}{self._where_met(others)}")
        return f"{_plan_words(self._audit, plan)}, {'; '.join(clauses)}."

    def _where_met(self, nodes: Collection[str]) -> str:
        """A clause on the formats and strategies under which the problem of some operations occurs; "" if unknown."""
        met = dict[tuple[str, str], None]()
        for finding in self.members:
            if finding.bearing and finding.node in nodes:
                met |= dict.fromkeys((fmt, how) for fmt, strategies in finding.met.items() for how in strategies)
        if not met:
            return ""
        under = " or ".join(f"{label(fmt)} {strategy_of(how).title}" for fmt, how in met)
        occurs = "only occurs" if any(finding.agrees for finding in self.members) else "could only occur"
        return f", which {occurs} in {under}"

    @property
    def is_avoided(self) -> bool:
        """Whether the plan avoids the problem of every operation of the cause, and a repair would gain nothing. An error
        is never avoided: without the plan, the model raises."""
        if self.severity == "error" or self._repairs:
            return False
        return {finding.bearing for finding in self.members} <= {"elsewhere", "kept"}

    @property
    def cost(self) -> str:
        """A sentence on the FLOPs in FP32 with the cause's modules kept in FP32; "" if the plan keeps them in FP32."""
        nodes, owners = self._audit.nodes, self.owners
        total = sum(report.flops for report in nodes)
        if not total or "" in owners or all(finding.bearing == "kept" for finding in self.members):
            return ""
        share = sum(r.flops for r in nodes if any(within(r.node.owner, owner) for owner in owners)) / total
        whole = "this whole module" if len(owners) == 1 else f"all of these {len(owners):,} modules"
        if not share:
            return f"Keeping {whole} in FP32 costs no FLOPs, but adds dtype conversions and memory."
        return f"Keeping {whole} in FP32 would keep {percent(share)} of the model's FLOPs in FP32."


@dataclass(frozen=True)
class Causes:
    """All causes, ranked. wanting: errors and warnings; notes: others, one of each kind, without `unconfirmed`: notes that
    the measurement contradicts; about: the plan that severities refer to; fails: whether the model without a plan raises
    an error; lost: an output that exceeds the budget by itself under the recommended plan, "" if none does."""

    wanting: tuple[Cause, ...]
    notes: tuple[Cause, ...]
    about: str
    unconfirmed: tuple[Cause, ...] = ()
    fails: bool = False
    lost: str = ""

    @property
    def all(self) -> tuple[Cause, ...]:
        """Every cause of findings, the worst first."""
        return self.wanting + self.notes + self.unconfirmed

    @property
    def to_do(self) -> tuple[Cause, ...]:
        """Causes of errors and warnings whose repair gains something, or which the plan does not avoid; those first that
        the verdict says to repair first."""
        open_ones = [cause for cause in self.wanting if not cause.is_avoided]
        return tuple(sorted(open_ones, key=lambda cause: not cause.is_repaired_first))

    @property
    def avoided(self) -> tuple[Cause, ...]:
        """Causes of errors and warnings that are not in `to_do`."""
        return tuple(cause for cause in self.wanting if cause.is_avoided)

    @property
    def headline(self) -> str:
        """The number of problems of each severity, and the number of notes, in words."""
        notes_in_words = count(len(self.notes), "note")
        if not self.wanting and self.fails:
            return "the model fails to run without a plan" + f", {notes_in_words}" * bool(self.notes)
        if not self.wanting and self.lost:
            return (
                f"no finding, but output `{self.lost}` alone exceeds the error budget"
                + f", {notes_in_words}" * bool(self.notes)
            )
        if not self.wanting:
            none = self._why_none()
            return f"nothing to fix, {notes_in_words}" if self.notes else f"nothing to fix: {none}"
        kinds = Counter(cause.severity for cause in self.wanting)
        counts = [count(kinds[severity], severity) for severity in SEVERITIES if kinds[severity]]
        total = f"{count(len(self.wanting), 'problem')} ({', '.join(counts)})"
        if not self.to_do:
            total += f", {'' if len(self.wanting) == 1 else 'all '}avoided by the plan"
        return total + f", {notes_in_words}" * bool(self.notes)

    def _why_none(self) -> str:
        """Why there is nothing to fix, in words."""
        if not self.unconfirmed:
            return "no rule matched"
        overflows = filter(None, (cause.overflowing for cause in self.unconfirmed))
        first = next(overflows, None)
        if first is None:
            return "the measurement confirms no finding"
        finding, fmt = first
        at = finding.source or scope(finding.owner)
        return f"values at {at} turn Inf in {label(fmt)} ({finding.rule}), which changes the outputs little"


def causes_by_place(audit: Audit) -> tuple[Cause, ...]:
    """Group findings into causes, and rank these by severity, by their rules' default severity, rules before
    measurements, then by effect; notes that the measurement contradicts come last. The order is reproducible."""
    reports = {r.node.name: r for r in audit.nodes}
    groups: dict[Any, list[Finding]] = {}
    for finding in audit.findings:
        alone = (finding.rule, finding.severity, pattern(finding.owner), finding.op, finding.source)
        groups.setdefault(finding.cause or alone, []).append(finding)
    found = [Cause(audit, members, reports) for members in groups.values()]
    ranked = sorted(found, key=lambda cause: cause.rank)
    return tuple(sorted(ranked, key=lambda cause: cause.is_refuted))


def causes(audit: Audit) -> Causes:
    """The causes of findings, ranked as in `causes_by_place`. Notes of one kind are one cause, whatever their places: a
    reader decides about all of them at once."""
    result = causes_by_place(audit)
    wanting = [cause for cause in result if cause.severity != "info"]
    notes = _join_by_kind(audit, [cause for cause in result if cause.severity == "info"])
    confirmed = [note for note in notes if not note.is_contradicted]
    contradicted = [note for note in notes if note.is_contradicted]

    about = ""
    planned = next((finding.plan for finding in audit.findings if finding.plan), "")
    plan = audit.plans.get(planned)
    if plan is not None and wanting:
        raises = any(f.rule.startswith(FAILURES) and f.severity == "error" for f in audit.findings)
        unless = ", unless the model raises an error without it" if raises else ""
        about = f"Problems that {_plan_words(audit, plan)}, avoids are reported as warnings at most{unless}."
    elif any(finding.bearing == "stops" for finding in audit.findings):
        about = "No plan uses low precision: severities are the rules' defaults."
    fails = any(run.failure for run in audit.baselines.values())
    chosen = audit.plans.get(audit.recommended or "")
    beyond = outputs_beyond(audit, chosen.verification if chosen is not None else None)
    return Causes(tuple(wanting), tuple(confirmed), about, tuple(contradicted), fails, next(iter(beyond), ""))


def outputs_beyond(audit: Audit, run: Verification | None) -> dict[str, float]:
    """{output: its own error} of outputs beyond the error budget that all outputs together are within, the worst first.
    Outputs that a criterion covers are excluded."""
    errors = run.apart if run is not None else {}
    offers = {offer.output: offer.criterion for offer in audit.proposals if not offer.holds}
    beyond = dict[str, float]()
    for name in sorted(errors, key=lambda each: -errors[each]):
        if ": rel_l2 <= " in offers.get(name, "") and errors[name] > audit.max_error:
            beyond[name] = errors[name]
    return beyond


def _join_by_kind(audit: Audit, notes: Sequence[Cause]) -> list[Cause]:
    """The notes, with those of one kind joined; of notes that the measurement contradicts, those of one rule."""
    reports = {report.node.name: report for report in audit.nodes}
    groups: dict[tuple[bool, str], list[Cause]] = {}
    for note in notes:
        kind = note.worst.rule if note.is_contradicted else _kind_of(note)
        groups.setdefault((note.is_contradicted, kind), []).append(note)
    joined = []
    for group in groups.values():
        members = [finding for note in group for finding in note.members]
        joined.append(group[0] if len(group) == 1 else Cause(audit, members, reports))
    return joined


def _kind_of(note: Cause) -> str:
    """What a note is about: precision, or else what all rules with its prefix are about, such as the hardware."""
    return "precision" if note.worst.measurable else note.worst.rule.rstrip("0123456789")


def repair_words(audit: Audit, repair: Repair) -> str:
    """The predicted plan after a repair: `FP16 with cast weights is predicted at 2.04x instead of 1.01x, with everything
    in low precision`."""
    plan = audit.plans[repair.plan]
    rest = f"with {count(repair.kept, 'module')} in FP32" if repair.kept else "with everything in low precision"
    return f"{plan_title(plan)} is predicted at {repair.speedup:.2f}x instead of {repair.before:.2f}x, {rest}"


def _effect(report: NodeReport | None, formats: tuple[str, ...]) -> float:
    """The largest change of the outputs, over `formats`, with only the operation of `report` in low precision."""
    if report is None:
        return 0.0
    largest = 0.0
    for fmt in formats:
        if fmt in report.contributions:
            effect = report.contributions[fmt].isolated
            largest = max(largest, math.inf if math.isnan(effect) else effect)
    return largest


def _plan_words(audit: Audit, plan: Plan) -> str:
    role = "recommended plan" if plan.name == audit.recommended else "fastest plan within the budget"
    return f"{plan_title(plan)}, the {role}"


BEARINGS = {
    "kept": "keeps {}{} in FP32",
    "low": "runs {} on low-precision values, with an error within the limit",
    "reads": "runs {} in FP32 on low-precision inputs, with an error within the limit",
}


def _these(nodes: Collection[str], every: Collection[str]) -> str:
    if len(nodes) < len(every):
        return f"{len(nodes):,} of these operations"
    return "the operation" if len(every) == 1 else f"these {len(every):,} operations"


AGREEMENT = {
    True: "The measurement confirms this finding.",
    False: "The measurement on these inputs does not confirm this finding.",
    None: "Running this operation alone can neither confirm nor refute this finding: judge by its reason.",
}
