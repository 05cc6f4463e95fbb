"""Applies rules to nodes, compares the findings with the measurement, and applies the user's ignores."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

import torch

from ..numerics.formats import auditable, significant_bits
from ..numerics.schemes import SCHEMES
from ..records import Capture, Finding, Node, Verdict
from ..records.ledger import SilentCast
from ..records.measure import MEASURED, Ignore
from .conditions import evaluate, facts_used
from .facts import NodeFacts, value_at
from .patterns import Matcher
from .rule import CONFIDENCES, SEVERITIES, Rule, facts_shown, fill_message, without

TRAINING = "training"
"""Name of the family of rules about gradients."""


def classify(
    capture: Capture,
    facts: Mapping[str, NodeFacts],
    rules: Sequence[Rule],
    formats: Collection[str] | None = None,
    trains: bool = True,
) -> tuple[Finding, ...]:
    """Apply rules. Returns findings in graph order, then by code; the measurement sets `agrees` later.

    formats: the audited formats and schemes, by default all; rules about others, such as TF32, always apply. trains:
    whether training is audited. A finding is dropped if another finding on the same operation supersedes it.
    """
    known = (*auditable(), *SCHEMES)
    formats = known if formats is None else formats
    others = set(known).difference(formats)  # not audited: texts leave them out
    matcher = Matcher(capture, facts)
    findings = list[Finding]()
    for rule in rules:
        if rule.family == TRAINING and not trains:
            continue
        named = tuple(fmt for fmt in rule.formats if fmt in formats or fmt not in known)
        if not named:
            continue
        why = without(others, rule.why)
        for name in matcher.find(rule.match):
            if evaluate(rule.when, facts[name]) is True:
                findings.append(_make_finding(rule, capture, facts[name], name, named, why))
    order = {name: index for index, name in enumerate(capture.nodes)}
    most_specific = _most_specific(findings, {rule.code: rule for rule in rules})
    return tuple(sorted(most_specific, key=lambda finding: (order[finding.node], finding.rule)))


def _most_specific(findings: Sequence[Finding], rules: Mapping[str, Rule]) -> list[Finding]:
    """Findings that none on the same node, in one of the same formats, supersedes; each gets the highest severity and
    confidence of the findings that it supersedes."""
    by_node: dict[str, list[Finding]] = {}
    for finding in findings:
        by_node.setdefault(finding.node, []).append(finding)

    def replaces(one: Finding, other: Finding) -> bool:
        return other.rule in rules[one.rule].supersedes and not {*one.formats}.isdisjoint(other.formats)

    kept = []
    for fired in by_node.values():
        for finding in fired:
            if not any(replaces(one, finding) for one in fired):
                group = [finding, *(other for other in fired if replaces(finding, other))]
                severity = max((one.severity for one in group), key=SEVERITIES.index)
                confidence = max((one.confidence for one in group), key=CONFIDENCES.index)
                kept.append(replace(finding, severity=severity, confidence=confidence))
    return kept


def _make_finding(
    rule: Rule, capture: Capture, facts: NodeFacts, name: str, formats: tuple[str, ...], why: str
) -> Finding:
    message = without(set(rule.formats).difference(formats), rule.message)
    evidence = {fact: value_at(facts, fact) for fact in (*facts_used(rule.when), *facts_shown(message, formats))}
    text = fill_message(message, vars(facts), formats).removesuffix(".")
    others = (other.advice for other in rule.other_advice if evaluate(other.when, facts) is True)
    texts = {"message": text, "why": why, "advice": next(others, rule.advice)}
    return finding_of(rule, **described(capture.nodes[name]), formats=formats, evidence=evidence, **texts)


def described(node: Node) -> dict[str, Any]:
    """The fields of a finding that describe its node."""
    return {"node": node.name, **{key: getattr(node, key) for key in ("owner", "op", "source", "called_from")}}


def finding_of(rule: Rule, **about: Any) -> Finding:
    """A finding of a rule, with the texts of the rule file."""
    same = ("name", "severity", "confidence", "formats", "why", "advice", "references", "measurable")
    return Finding(
        **{"rule": rule.code, "declared": rule.severity, **{key: getattr(rule, key) for key in same}, **about}
    )


UNUSED_IGNORE = "CFG001"
SILENT = {
    "loading": "CST001",
    "conversion": "CST002",
    "creation": "CST003",
    "forward": "CST004",
    "autocast": "CST005",
    "scale": "CST006",
}
"""{kind of a silent cast: its rule}."""
NAMED = 3
"""Number of tensors that a finding on a silent cast names."""
FLAGGED = ("unsafe", "sensitive")


def compare_with_verdicts(
    findings: Sequence[Finding],
    verdicts: Mapping[str, Mapping[str, Verdict]],
    origins: Collection[tuple[str, str]] = (),
) -> tuple[Finding, ...]:
    """Set `agrees` of each finding; if rule and measurement differ, the measurement decides.

    A finding on an operation that was measured to be safe becomes info. An MSR finding (of the measurement alone) is
    kept if, in one of its formats, no rule's warning or error is confirmed on its node or in its module. origins: (node,
    format) where Inf or NaN begins, which only a rule on the same node explains.
    """
    compared = [_confront(finding, verdicts.get(finding.node, {})) for finding in findings]
    causes = [one for one in compared if one.rule not in MEASURED and one.severity != "info" and one.measurable]
    confirmed = [(one, fmt) for one in causes for fmt in _confirmed_formats(one, verdicts.get(one.node, {}))]
    nodes = {(finding.node, fmt) for finding, fmt in confirmed}
    owners = {(finding.owner, fmt) for finding, fmt in confirmed if finding.owner}
    return tuple(
        finding
        for finding in compared
        if finding.rule not in MEASURED
        or any(
            (finding.node, fmt) not in nodes and ((finding.owner, fmt) not in owners or (finding.node, fmt) in origins)
            for fmt in finding.formats
        )
    )


def with_batches(
    findings: Sequence[Finding],
    capture: Capture,
    verdicts: Mapping[str, Mapping[str, Verdict]],
    of_first: Collection[tuple[str, str]] = (),
) -> tuple[Finding, ...]:
    """Add the batch number to findings that only a later batch shows; merge equal findings on several recorded runs.

    of_first: (rule, node) of findings on the first batch.
    """
    kept: dict[object, Finding] = {}
    for finding in findings:
        number = 1  # on a later batch: the batch with the verdicts, or the first that runs the operation
        if finding.node in capture.nodes and (finding.rule, finding.node) not in of_first:
            judged = [one for fmt, one in verdicts[finding.node].items() if fmt in finding.formats]
            wrong = (one.batch for one in judged if one.verdict in FLAGGED)
            number = min(wrong, default=capture.nodes[finding.node].batch)
        named = number == 1 or f"batch {number}" in finding.message
        message = finding.message if named else f"{finding.message.rstrip('.')}, in batch {number}"
        where = capture.twins.get(finding.node, finding.node) or id(finding)
        kept.setdefault((finding.rule, where, finding.formats), replace(finding, message=message))
    return tuple(kept.values())


def apply_selection(
    findings: Sequence[Finding], select: Sequence[str], ignores: Sequence[Ignore], rules: Sequence[Rule]
) -> tuple[Finding, ...]:
    """The findings with the selected codes (by default all) that no ignore matches; then a finding for each unused
    ignore."""
    wanted = tuple(select) or ""
    chosen = [finding for finding in findings if finding.rule.startswith(wanted)]
    unused = [ignore for ignore in ignores if not any(_ignores(ignore, finding) for finding in chosen)]
    for rule in (rule for rule in rules if rule.code == UNUSED_IGNORE and rule.code.startswith(wanted)):
        for ignore in unused:
            message = f"{rule.message}: {ignore.code}{'' if ignore.module == '*' else f' in {ignore.module!r}'}"
            about = {"module": ignore.module, "code": ignore.code, "reason": ignore.reason}
            own = {"op": "auditor.ignore", "source": ignore.source, "message": message, "evidence": about}
            chosen.append(finding_of(rule, node="", owner="", **own))
    return tuple(finding for finding in chosen if not any(_ignores(one, finding) for one in ignores))


def silent_findings(
    casts: Sequence[SilentCast], capture: Capture, rules: Sequence[Rule], formats: Collection[str]
) -> tuple[Finding, ...]:
    """A finding for each cast that nobody asked for, with the bits that it loses."""
    known = {rule.code: rule for rule in rules}
    findings = []
    for cast in casts:
        if (rule := known.get(SILENT[cast.kind])) is not None:
            owner = cast.names[0].rpartition(".")[0]
            place = {"node": "", "owner": owner, "op": "auditor.cast", "source": cast.source}
            place = described(capture.nodes[cast.node]) if cast.node in capture.nodes else place
            lost = vars(cast.loss) if cast.loss else {}
            evidence = {"names": cast.names, "before": cast.before, "after": cast.after, **lost}
            message = f"{rule.message}: {_said(cast)}"
            findings.append(finding_of(rule, **place, formats=tuple(formats), message=message, evidence=evidence))
    return tuple(findings)


def _said(cast: SilentCast) -> str:
    """A text: which tensors are cast, from which dtype to which, and how the cast changes the values."""
    before = significant_bits(getattr(torch, cast.before))
    after = significant_bits(getattr(torch, cast.after))
    names = ", ".join(cast.names[:NAMED])
    left = len(cast.names) - NAMED
    if left > 0:
        names += f" and {left} more"
    text = f"{names}, from {cast.before} to {cast.after}, {before} to {after} significant bits"
    loss = cast.loss
    if loss is None:
        return text
    text += f"; {loss.changed:.0%} of the values change, by {loss.error:.2g} (relative L2)"
    if loss.zeros:
        text += f", {loss.zeros:.2g} become zero"
    if loss.infinite:
        text += f", {loss.infinite:,} become Inf or NaN"
    return text


def _confront(finding: Finding, verdicts: Mapping[str, Verdict]) -> Finding:
    """The finding with `agrees`, by the verdicts on its operation in the finding's formats."""
    measured = {verdicts[name].verdict for name in finding.formats if name in verdicts} - {"untested"}
    if not measured or not finding.measurable:
        return finding
    confidence = "high" if "unsafe" in measured else finding.confidence
    if measured.isdisjoint(FLAGGED):
        return replace(finding, agrees=False, confidence=confidence, severity="info")
    return replace(finding, agrees=True, confidence=confidence)


def _confirmed_formats(finding: Finding, verdicts: Mapping[str, Verdict]) -> list[str]:
    """The formats of a finding in which its operation was measured to be unsafe or sensitive."""
    return [fmt for fmt in finding.formats if fmt in verdicts and verdicts[fmt].verdict in FLAGGED]


def _ignores(ignore: Ignore, finding: Finding) -> bool:
    return finding.rule.startswith(ignore.code) and fnmatchcase(finding.owner, ignore.module)
