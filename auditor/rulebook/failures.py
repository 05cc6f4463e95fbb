"""Compares rules about mixed dtypes with runs of the whole model in low precision, and reports runs that raised."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain

from torch import fx

from ..artefact.strategies import strategy_of
from ..capture.paths import reach
from ..numerics.formats import label
from ..records import Capture, Finding
from .findings import described, finding_of
from .gather import WORDS
from .rule import Rule

Failed = Mapping[tuple[str, str], str]
"""{(strategy, format): the message of the run that raised, with the source line}."""

_MIXED, _FAILED = "dtypes", "RUN001"
"""The family of rules about operations that raise since their inputs have two dtypes; the rule about other errors."""
_MOST_FIXES, _MOST_LINES = 2, 3
"""Maximum numbers of further fixes and lines that a finding on mixed dtypes names."""
OTHERS = "other_operations"
"""Evidence of a finding on mixed dtypes: the other operations that raise for the same reason."""
_RAISED_AT = re.compile(r"\((\S[^()]*:\d+)\)$")
_STRATEGIES = {words: where for where, words in WORDS.items() if words}


def judge_failures(
    findings: Sequence[Finding], failed: Failed, capture: Capture, rules: Sequence[Rule]
) -> tuple[Finding, ...]:
    """The findings, where those on mixed dtypes are compared with the runs, and one for each other line that raised.

    A finding on mixed dtypes is confirmed if a run raised there, and dropped if every run passed its operation. If
    runs raised before its operation, it is a warning, unless the fix of a confirmed finding repairs it too. Findings on
    FP32 values of one origin become one.
    """
    families = {rule.code: rule.family for rule in rules}
    order = {name: index for index, name in enumerate(capture.nodes)}
    mixed = sorted((f for f in findings if families[f.rule] == _MIXED), key=lambda finding: order[finding.node])
    rest = [finding for finding in findings if families[finding.rule] != _MIXED]
    raised = {run: _first_raised(run, message, mixed, capture) for run, message in failed.items()}
    judged = [_compare(finding, raised, order) for finding in mixed]
    remaining = [finding for finding in judged if finding is not None]
    repaired = {_fix_of(finding): (finding.source, finding.op) for finding in remaining if finding.agrees}
    kept = [
        one
        for one in remaining
        if repaired.get(_fix_of(one), (one.source, one.op)) == (one.source, one.op) or one.agrees
    ]
    known = {(f.source, fmt) for f in rest for fmt in f.formats if f.severity != "info"}
    unknown = {
        (strategy, fmt): message
        for (strategy, fmt), message in failed.items()
        if raised[strategy, fmt] not in {one.node for one in mixed} and (_line_of(message), fmt) not in known
    }
    return (*rest, *_merge_by_origin(kept, capture), *_failures(unknown, capture, rules))


def _merge_by_origin(mixed: Sequence[Finding], capture: Capture) -> list[Finding]:
    """One finding for each origin of FP32 values, on the first operation that raises. It counts the other operations,
    and gives the fixes of other lines that read these values before another operation of the findings does."""
    before = _operations_before(mixed, capture)
    groups = dict[str, list[Finding]]()
    group_of = dict[str, str]()
    for finding in mixed:  # in graph order
        earlier = before[finding.node]
        origin = str(finding.evidence["fp32_origin"]) if not earlier else group_of[earlier]
        group_of[finding.node] = origin
        groups.setdefault(origin, []).append(finding)
    result = list[Finding]()
    for group in groups.values():
        first, *others = sorted(group, key=lambda each: not each.agrees)  # a confirmed one first
        same = [each for each in others if _runs_of(each) <= _runs_of(first)]
        own_fixes = [str(each.evidence["dtype_fix"]) for each in same if not before[each.node]]
        result += [_with_places(first, same, own_fixes), *(each for each in others if each not in same)]
    return result


def _runs_of(finding: Finding) -> set[tuple[str, str]]:
    return {(fmt, strategy) for fmt, strategies in finding.met.items() for strategy in strategies}


def _with_places(first: Finding, others: Sequence[Finding], own_fixes: Sequence[str]) -> Finding:
    """The finding with the number of other operations that raise for the same reason, and the fixes of their lines."""
    if not others:
        return first
    fixes = [fix for fix in dict.fromkeys(own_fixes) if fix != first.evidence["dtype_fix"]]
    added = fixes[:_MOST_FIXES]
    if len(fixes) > len(added):
        added.append(f"{len(fixes) - len(added)} more lines alike")
    lines = list(dict.fromkeys(each.source for each in others if each.source))
    named = ", ".join(lines[:_MOST_LINES])
    more = ", ..." if len(lines) > _MOST_LINES else ""
    count = f"{len(others)} more operations raise" if len(others) > 1 else "1 more operation raises"
    message = ", and ".join([first.message, *added]) + f". For the same reason {count} ({named}{more})"
    operations = tuple(each.node for each in others)
    return replace(first, message=message, evidence={**first.evidence, OTHERS: operations})


def _operations_before(mixed: Sequence[Finding], capture: Capture) -> dict[str, str]:
    """{operation that raises: the first operation upstream of it that raises as well}.

    The value is "" without such an operation, and if the FP32 values also arrive from the lines where they were made,
    without passing an operation that raises.
    """
    graph = {node.name: node for node in capture.graph_module.graph.nodes}
    members = {finding.node for finding in mixed}

    def inputs_of(node: fx.Node) -> list[fx.Node]:
        return [] if node.name in members else node.all_input_nodes

    result = dict[str, str]()
    for finding in mixed:
        upstream = {node.name for node in reach(graph[finding.node].all_input_nodes, inputs_of)}
        earlier = [name for name in graph if name in upstream & members]
        made = re.findall(r"[^\s()]+:\d+", str(finding.evidence["fp32_origin"]))
        reads_origin = any(_made_at(capture, name) in made for name in upstream)
        result[finding.node] = "" if reads_origin or not earlier else earlier[0]
    return result


def _made_at(capture: Capture, name: str) -> str:
    """The source line at which an operation, or a constant of the model, makes its value; "" if unknown."""
    if name in capture.nodes:
        return capture.nodes[name].source or ""
    made = next((place.made for place in capture.placeholders if place.name == name), None)
    return (made.source or "") if made is not None else ""


def _line_of(error_text: str) -> str | None:
    """The source line at the end of a message, as `file:line`."""
    at = _RAISED_AT.search(error_text)
    return at[1] if at else None


def _first_raised(run: tuple[str, str], message: str, mixed: Sequence[Finding], capture: Capture) -> str:
    """The operation that raised in a run: the first with mixed dtypes in the line that raised, otherwise the line's
    first; "" if the line has none."""
    line = _line_of(message)
    predicted = (one.node for one in mixed if one.source == line and _is_about(one, run))
    others = (name for name, node in capture.nodes.items() if line and node.source == line)
    return next(chain(predicted, others), "")


def _fix_of(finding: Finding) -> str:
    """The fix of mixed dtypes, whatever tensor's dtype it names."""
    return re.sub(r"[\w.]+\.dtype", "dtype", str(finding.evidence.get("dtype_fix")))


def _is_about(finding: Finding, run: tuple[str, str]) -> bool:
    """Whether a finding on mixed dtypes predicts that the run raises."""
    strategy, fmt = run
    under_autocast, with_cast = _STRATEGIES[str(finding.evidence["mixed_where"])]
    return fmt in finding.formats and {"autocast": under_autocast, "cast": with_cast}.get(strategy, False)


def _compare(finding: Finding, raised: Mapping[tuple[str, str], str], order: Mapping[str, int]) -> Finding | None:
    """The finding with the runs in which its operation raised, or would have if an earlier one had not; None without."""
    at = order[finding.node]
    runs = [run for run, node in raised.items() if _is_about(finding, run) and order.get(node, -math.inf) <= at]
    if not runs:
        return None
    met: dict[str, tuple[str, ...]] = {}
    for strategy, fmt in runs:
        met[fmt] = (*met.get(fmt, ()), strategy)
    confirmed = any(raised[run] == finding.node for run in runs)
    strategies, formats = {strategy for strategy, _ in runs}, tuple(fmt for fmt in finding.formats if fmt in met)
    where = WORDS["autocast" in strategies, "cast" in strategies]
    before = f"{_listed(finding.formats)} {finding.evidence['mixed_where']}"
    return replace(
        finding,
        formats=formats,
        met=met,
        agrees=True if confirmed else None,
        severity=finding.severity if confirmed else "warning",
        message=finding.message.replace(before, f"{_listed(formats)} {where}"),
    )


def _listed(formats: Iterable[str]) -> str:
    return " and ".join(map(label, formats))


def _failures(failed: Failed, capture: Capture, rules: Sequence[Rule]) -> list[Finding]:
    """A finding for each source line at which runs raised; the table of plans shows messages without a line."""
    rule = next((rule for rule in rules if rule.code == _FAILED), None)
    lines = dict[str, dict[tuple[str, str], str]]()
    for run, message in failed.items() if rule is not None else ():
        if (line := _line_of(message)) is not None:
            lines.setdefault(line, {})[run] = message
    return [_failure(rule, line, raised, capture) for line, raised in lines.items() if rule is not None]


def _failure(rule: Rule, line: str, raised: Failed, capture: Capture) -> Finding:
    """The finding on a source line at which runs raised. raised: these runs."""
    node = next((each for each in capture.nodes.values() if each.source == line), None)
    met: dict[str, tuple[str, ...]] = {}
    for strategy, fmt in raised:
        met[fmt] = (*met.get(fmt, ()), strategy)
    strategies = dict.fromkeys(strategy_of(strategy).title for strategy, _ in raised)
    where = f"in {_listed(met)} {' and '.join(strategies)}"
    return finding_of(
        rule,
        **(described(node) if node else {"node": "", "owner": "", "op": "auditor.run", "source": line}),
        formats=tuple(met),
        message=f"{rule.message}, {where}: {next(iter(raised.values()))}",
        agrees=True,
        met=met,
    )
