"""Compares two audits: new and resolved findings, and changes of plans and verdicts."""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..records import Audit, Finding, Node, NodeReport, Plan
from ..records.audit import Contributions
from ..records.measure import MEASURED
from ..rulebook.rule import SEVERITIES

BAND = 2.0
"""An operation's effect on the outputs counts as changed if it grew by more than this factor."""
SLOWER = 0.97
"""A plan counts as slower if its predicted speed-up is below this share of the earlier one."""


@dataclass(frozen=True)
class VerdictChange:
    """An operation whose verdict in one format changed. before, after: the verdicts; None: no such operation or
    verdict."""

    node: Node
    format: str
    before: str | None
    after: str | None


@dataclass(frozen=True)
class Comparison:
    """The differences between two audits. caveats: settings that differ, as (setting, before, after)."""

    before: Audit
    after: Audit
    new: tuple[Finding, ...]
    gone: tuple[Finding, ...]
    plans: tuple[tuple[str, Plan | None, Plan | None], ...]
    verdicts: tuple[VerdictChange, ...]
    caveats: tuple[tuple[str, str, str], ...]

    @property
    def unchanged_findings(self) -> int:
        """Number of findings of the later audit that are not new."""
        return len(self.after.findings) - len(self.new)


def compare(before: Audit, after: Audit) -> Comparison:
    """All differences between two audits, in the order of the later audit, then of the earlier one."""
    was = settings(before)
    now = settings(after)
    gone = list[Finding]()
    left = Counter(map(_identity, after.findings))
    for finding in before.findings:
        identity = _identity(finding)
        left[identity] -= 1
        if left[identity] < 0:
            gone.append(finding)
    old = _by_place(before.nodes)
    new = _by_place(after.nodes)
    changes = list[VerdictChange]()
    for key in {**new, **old}:
        node = (new.get(key) or old[key]).node
        earlier = _verdicts_of(old.get(key))
        later = _verdicts_of(new.get(key))
        for fmt in earlier | later:
            if earlier.get(fmt) != later.get(fmt):
                changes.append(VerdictChange(node, fmt, earlier.get(fmt), later.get(fmt)))
    return Comparison(
        before,
        after,
        new=fresh(before, after),
        gone=tuple(gone),
        plans=tuple((n, before.plans.get(n), after.plans.get(n)) for n in {**after.plans, **before.plans}),
        verdicts=tuple(changes),
        caveats=tuple((what, was[what], value) for what, value in now.items() if was[what] != value),
    )


def _verdicts_of(report: NodeReport | None) -> dict[str, str]:
    """{format: verdict}; {} without a report."""
    return {} if report is None else {fmt: verdict.verdict for fmt, verdict in report.verdicts.items()}


def regressions(both: Comparison) -> list[str]:
    """What got worse between two audits, in words: recommended plan, its error and speed-up, findings, verdicts."""
    worse = _worse_plan(both)
    for severity in ("error", "warning"):
        rules = [finding.rule for finding in both.new if finding.severity == severity]
        if rules:
            names = ", ".join(sorted({*rules}))
            worse.append(f"new findings of severity {severity}: {len(rules)} ({names})")
    unsafe = sum(change.after == "unsafe" and change.before is not None for change in both.verdicts)
    if unsafe:
        worse.append(f"operations that became unsafe: {unsafe}")
    return worse


def _worse_plan(both: Comparison) -> list[str]:
    """How the recommended plan of the later audit is worse than that of the earlier one, in words."""
    before = both.before.plans.get(both.before.recommended or "")
    after = both.after.plans.get(both.after.recommended or "")
    if before is None:
        return []
    if after is None:
        return [f"{before.name} was recommended before, no plan now"]
    worse = list[str]()
    old_error, new_error = before.measured_error, after.measured_error
    if old_error and new_error and new_error > BAND * old_error:
        worse.append(f"error {new_error / old_error:.1f} times as large as before")
    if after.predicted_speedup < SLOWER * before.predicted_speedup:
        worse.append(f"speed-up {before.predicted_speedup:.2f}x before, {after.predicted_speedup:.2f}x now")
    return worse


def settings(audit: Audit) -> dict[str, str]:
    """{setting: its value in words}, for settings that must be equal if numbers of two audits are to be comparable."""
    subject, environment = audit.subject, audit.environment
    return {
        "parameters": str(audit.parameters),
        "inputs": ", ".join(audit.inputs),
        "source of the inputs": subject.inputs_source,
        "source of the weights": subject.weights_source,
        "budget": "; ".join([f"{audit.max_error} {audit.metric}", *audit.criteria]),
        "execution": f"{environment.device}, {environment.execution}",
        "torch": environment.torch,
        "auditor": environment.auditor,
    }


def figures(plan: Plan | None) -> tuple[Any, ...] | None:
    """The values of a plan that two audits are compared by; None if `plan` is None."""
    if plan is None:
        return None
    errors = plan.predicted_error, plan.measured_error
    return plan.format, *errors, plan.predicted_speedup, plan.is_verified, plan.islands, plan.exceptions


def fresh(before: Audit, audit: Audit) -> tuple[Finding, ...]:
    """The findings of an audit that an earlier audit lacks, or reports as less severe.

    A finding whose severity rose, but not to error, is not new if its measurement is unchanged: the same outcome, or
    contributions that grew by at most the factor BAND. Contributions under another error budget are not comparable.
    """
    comparable = settings(before)["budget"] == settings(audit)["budget"]
    both = contributions_of(before), contributions_of(audit)

    def steady(finding: Finding) -> bool:
        """Whether the contributions behind a finding grew at most by the factor BAND."""
        pairs = list[tuple[float, float]]()
        for fmt in finding.formats:
            was, now = (found.get(fmt, {}).get(finding.owner, {}).get(finding.op, 0.0) for found in both)
            pairs.append((was, now))
        if not comparable or not any(now for _, now in pairs):
            return False
        return all(now <= BAND * was for was, now in pairs)

    left: dict[tuple[str, ...], list[Finding]] = defaultdict(list)
    for old in before.findings:
        left[_identity(old)].append(old)
    new = set()
    for place, finding in sorted(enumerate(audit.findings), key=lambda pair: -_level(pair[1])):
        candidates = left[_identity(finding)]
        known = max((old for old in candidates if _covers(old, finding, steady)), key=_level, default=None)
        if known is not None:
            candidates.remove(known)
        elif finding.rule not in MEASURED or not steady(finding):
            new.add(place)
    return tuple(audit.findings[place] for place in sorted(new))


def contributions_of(audit: Audit) -> Contributions:
    """The largest contribution of each operation of each module, to three digits. Operations that would be safe even at
    BAND times their contribution are left out."""
    if audit.contributions:
        return audit.contributions
    from ..measure.rerun import SENSITIVE_SHARE

    least = SENSITIVE_SHARE * audit.max_error / BAND
    result: dict[str, dict[str, dict[str, float]]] = {}
    for report in audit.nodes:
        for fmt, moved in report.contributions.items():
            if not moved.isolated < least:
                of = result.setdefault(fmt, {}).setdefault(report.node.owner, {})
                size = moved.isolated if math.isfinite(moved.isolated) else math.inf
                of[report.node.op] = float(f"{max(size, of.get(report.node.op, 0.0)):.3g}")
    return result


def _covers(old: Finding, finding: Finding, steady: Callable[[Finding], bool]) -> bool:
    """Whether an old finding covers `finding`: it is as severe, or `finding` is no error and measured unchanged."""
    if _level(old) >= _level(finding):
        return True
    borne_out = old.agrees is not None and old.agrees == finding.agrees
    return finding.severity != "error" and (borne_out or steady(finding))


def _level(finding: Finding) -> int:
    return SEVERITIES.index(finding.severity)


def _identity(finding: Finding) -> tuple[str, ...]:
    """A finding's rule, module and operation; its line number and measured values vary between audits."""
    return finding.rule, finding.owner, finding.op


def _by_place(reports: Sequence[NodeReport]) -> dict[tuple[str, str, int], NodeReport]:
    """{(module, operator, index): results}: names of graph nodes shift when a node is added before them."""
    indices: defaultdict[tuple[str, str], Iterator[int]] = defaultdict(itertools.count)
    return {(r.node.owner, r.node.op, next(indices[r.node.owner, r.node.op])): r for r in reports}
