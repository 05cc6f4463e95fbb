"""Rules confronted with the measurement, and with what the user silences."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

from ..config import Ignore, Selection
from ..records import Capture, Finding, Verdict
from ..records.measure import MEASURED
from ..rulebook import Rule

UNUSED_IGNORE = "CFG001"
FLAGGED = ("unsafe", "sensitive")


def confronted(findings: Sequence[Finding], verdicts: Mapping[str, Mapping[str, Verdict]]) -> tuple[Finding, ...]:
    """Findings with `agrees` filled in; where rule and measurement differ, the measurement wins.

    A warning or error that the measurement does not bear out becomes info. A finding of the measurement alone stays
    only where no warning or error, on the same node or its module, covers its formats.
    """
    compared = [_confront(finding, verdicts.get(finding.node, {})) for finding in findings]
    causes = [finding for finding in compared if _is_cause(finding)]
    nodes = {(finding.node, fmt) for finding in causes for fmt in finding.formats}
    owners = {(finding.owner, fmt) for finding in causes for fmt in finding.formats if finding.owner}
    return tuple(
        finding
        for finding in compared
        if finding.rule not in MEASURED
        or any((finding.node, fmt) not in nodes and (finding.owner, fmt) not in owners for fmt in finding.formats)
    )


def concerning(findings: Sequence[Finding], exposed: Mapping[str, Mapping[str, Sequence[str]]]) -> tuple[Finding, ...]:
    """The findings without those on an operation that meets no low value, in any format they speak of, under any strategy.

    exposed: {node: {format: strategies that have it meet one}}. What is no matter of precision stays.
    """

    def concerns(finding: Finding) -> bool:
        by_format = exposed.get(finding.node, {})
        return not finding.measurable or any(by_format.get(fmt, True) for fmt in finding.formats)

    return tuple(finding for finding in findings if concerns(finding))


def with_batches(
    findings: Sequence[Finding],
    capture: Capture,
    verdicts: Mapping[str, Mapping[str, Verdict]],
    of_first: Collection[tuple[str, str]] = (),
) -> tuple[Finding, ...]:
    """The findings, those that a later batch alone shows with its number; what several paths show is there once.

    of_first: (rule, node) of what the first batch shows by itself.
    """
    kept: dict[object, Finding] = {}
    for finding in findings:
        shown = (finding.rule, finding.node) in of_first
        number = 1 if shown else _batch_of(finding, capture, verdicts)
        named = number == 1 or f"batch {number}" in finding.message
        message = finding.message if named else f"{finding.message.rstrip('.')}, in batch {number}"
        where = capture.twins.get(finding.node, finding.node) or id(finding)
        kept.setdefault((finding.rule, where, finding.formats), replace(finding, message=message))
    return tuple(kept.values())


def _batch_of(finding: Finding, capture: Capture, verdicts: Mapping[str, Mapping[str, Verdict]]) -> int:
    """Number of the batch that the operation's verdicts come from, or of the first that runs it."""
    if finding.node not in capture.nodes:
        return 1
    by_format = verdicts[finding.node]
    wrong = [by_format[fmt] for fmt in finding.formats if fmt in by_format and by_format[fmt].verdict in FLAGGED]
    return min((verdict.batch for verdict in wrong), default=capture.nodes[finding.node].batch)


def silenced(findings: Sequence[Finding], selection: Selection, rules: Sequence[Rule]) -> tuple[Finding, ...]:
    """The findings that a selection lets through, and behind them one for each of its ignores that matches none."""
    chosen = [finding for finding in findings if _selected(finding.rule, selection)]
    unused = [ignore for ignore in selection.ignores if not any(_ignores(ignore, finding) for finding in chosen)]
    rule = next((rule for rule in rules if rule.code == UNUSED_IGNORE), None)
    stale = [_unused(rule, ignore) for ignore in unused] if rule and _selected(UNUSED_IGNORE, selection) else []
    return tuple(
        finding for finding in [*chosen, *stale] if not any(_ignores(ignore, finding) for ignore in selection.ignores)
    )


def _is_cause(finding: Finding) -> bool:
    return finding.rule not in MEASURED and finding.severity != "info" and finding.measurable


def _confront(finding: Finding, verdicts: Mapping[str, Verdict]) -> Finding:
    measured = [verdicts[name].verdict for name in finding.formats if name in verdicts]
    measured = [verdict for verdict in measured if verdict != "untested"]
    if not measured or not finding.measurable:
        return finding
    agrees = any(verdict in FLAGGED for verdict in measured)
    if "unsafe" in measured:
        finding = replace(finding, confidence="high")
    if agrees or finding.severity == "info":
        return replace(finding, agrees=agrees)
    return replace(finding, agrees=False, severity="info")


def _selected(code: str, selection: Selection) -> bool:
    return not selection.select or any(code.startswith(prefix) for prefix in selection.select)


def _ignores(ignore: Ignore, finding: Finding) -> bool:
    return finding.rule.startswith(ignore.code) and fnmatchcase(finding.owner, ignore.module)


def _unused(rule: Rule, ignore: Ignore) -> Finding:
    where = "" if ignore.module == "*" else f" in {ignore.module!r}"
    return Finding(
        rule=rule.code,
        name=rule.name,
        node="",
        owner="",
        op="auditor.ignore",
        source=ignore.source,
        severity=rule.severity,
        confidence=rule.confidence,
        formats=rule.formats,
        message=f"{rule.message}: {ignore.code}{where}",
        why=rule.why,
        advice=rule.advice,
        evidence={"module": ignore.module, "code": ignore.code, "reason": ignore.reason},
        references=rule.references,
        declared=rule.severity,
        measurable=rule.measurable,
    )
