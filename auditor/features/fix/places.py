"""Selects the expressions of the user's source at which an audit, or a run that raised, shows a problem."""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ...capture.source import is_installed
from ...records import Audit, NodeReport, Span
from .records import Promotion, Trial
from .source import SIMPLE, Edits, Source, expression_before, original_offset

SHARE = 0.25
"""Share of the error budget from which the effect of one operation is worth a repair."""


@dataclass
class Spot:
    """An expression with a problem. weight: the largest effect on the outputs; the largest comes first. raises: whether a
    run raised there; rules, causes: of the findings there. last: number of following statements that share the problem."""

    source: Source
    node: ast.expr
    weight: float
    problem: str = ""
    rules: dict[str, None] = field(default_factory=dict)
    causes: dict[str, None] = field(default_factory=dict)
    raises: bool = False
    last: int | None = None

    @property
    def line(self) -> int:
        """The line of the expression."""
        return self.node.lineno


class Sources:
    """The user's files that a run passed through, read once. Files of installed packages are no sources."""

    def __init__(self) -> None:
        self._known: dict[str, Source | None] = {}

    def __getitem__(self, file: str) -> Source:
        source = self.of(file)
        assert source is not None
        return source

    def of(self, file: str) -> Source | None:
        """The Source of a file; None for a file of a package, a notebook's cell, or a file that is no Python."""
        if file not in self._known:
            self._known[file] = self._read(file)
        return self._known[file]

    def _read(self, file: str) -> Source | None:
        if is_installed(file) or not Path(file).is_file():
            return None
        try:
            return Source.read(file)
        except (OSError, UnicodeDecodeError, SyntaxError, ValueError):
            return None

    @property
    def by_file(self) -> Mapping[str, Source]:
        """{file: its Source}."""
        return {file: source for file, source in self._known.items() if source is not None}


def spots_of(audit: Audit, sources: Sources) -> list[Spot]:
    """The expressions of operations that are unsafe or sensitive, have a finding, or add much to the error, the one with
    the largest effect first."""
    result: dict[tuple[str, ast.expr], Spot] = {}
    bad: dict[tuple[str, ast.stmt], float] = {}
    findings: dict[str, list[tuple[str, str, str]]] = {}
    for one in audit.findings:
        findings.setdefault(one.node, []).append((one.rule, one.cause, one.severity))
    for report in audit.nodes:
        known = findings.get(report.node.name, [])
        weight = weight_of(report, audit.max_error)
        serious = [entry for entry in known if entry[2] != "info"]
        if weight is None and not serious:
            continue
        for depth, (source, node) in enumerate(expressions(report.node.expressions, sources)):
            if depth > 1:
                break
            key = (source.file, node)
            ranked = (weight or 0.0) * (1.0 if depth == 0 else 1e-3)
            spot = result.setdefault(key, Spot(source, node, 0.0))
            spot.weight = max(spot.weight, ranked)
            spot.rules |= dict.fromkeys(rule for rule, _, _ in known)
            spot.causes |= dict.fromkeys(cause for _, cause, severity in known if cause and severity != "info")
            spot.problem = spot.problem or problem_of(
                report, [rule for rule, _, severity in known if severity != "info"]
            )
            statement = source.statement_of(node)
            bad[source.file, statement] = max(bad.get((source.file, statement), 0.0), ranked)
    for spot in result.values():
        spot.last = _last_with_problem(spot, {statement for file, statement in bad if file == spot.source.file})
    return sorted(result.values(), key=lambda spot: (-spot.weight, spot.source.file, spot.line))


def problem_of(report: NodeReport, rules: list[str]) -> str:
    """The rules that report an operation and its name, in words."""
    op = report.node.op.removeprefix("aten.").partition(".")[0]
    if rules:
        return f"{', '.join(dict.fromkeys(rules))}: `{op}`"
    verdicts = {verdict.verdict for verdict in report.verdicts.values()}
    worst = "unsafe" if "unsafe" in verdicts else "sensitive" if "sensitive" in verdicts else "adds error"
    return f"`{op}` is {worst}" if worst != "adds error" else f"`{op}` adds to the error"


def weight_of(report: NodeReport, budget: float) -> float | None:
    """The largest effect of an operation in low precision on the outputs; None if it is no problem."""
    verdicts = {verdict.verdict for verdict in report.verdicts.values()}
    effects = [one.isolated for one in report.contributions.values()]
    largest = max((math.inf if math.isnan(effect) else effect for effect in effects), default=0.0)
    if "unsafe" in verdicts:
        return max(largest, 1e3) if math.isfinite(largest) else 1e6
    if "sensitive" in verdicts or largest > SHARE * budget:
        return min(largest, 1e3)
    return None


def expressions(spans: tuple[Span, ...], sources: Sources) -> Iterator[tuple[Source, ast.expr]]:
    """The expressions at places of the user's files, the innermost function's first; only those in functions."""
    for span in spans:
        source = sources.of(span.file)
        node = source.expression_at(span) if source is not None else None
        if source is not None and node is not None and source.function_of(node) is not None:
            yield source, node


def _last_with_problem(spot: Spot, bad: set[ast.stmt]) -> int:
    """Number of statements after the spot's up to the last one with a problem, in the same block."""
    statement = spot.source.statement_of(spot.node)
    last = 0
    for number, following in enumerate(spot.source.following(statement), start=1):
        if not isinstance(following, SIMPLE):
            break
        if following in bad:
            last = number
    return last


def raised_spots(trial: Trial, sources: Sources, edits: Edits = ()) -> list[Spot]:
    """The expressions that raised in a trial, one for each place. edits: those of the tried sources."""
    result: dict[tuple[str, ast.expr], Spot] = {}
    for run in trial.runs.values():
        if run.error is not None:
            continue
        for source, node in list(_before_edits(run.place, sources, edits))[:2]:
            spot = result.setdefault((source.file, node), Spot(source, node, math.inf, raises=True))
            said = run.failure.partition(": ")[2] or run.failure
            spot.problem = spot.problem or f"raises: {said[:80]}"
    return list(result.values())


def _before_edits(place: tuple[Span, ...], sources: Sources, edits: Edits) -> Iterator[tuple[Source, ast.expr]]:
    """The expressions of the original sources at places of the edited ones."""
    for span in place:
        source = sources.of(span.file)
        own = [edit for edit in edits if edit.file == span.file]
        if source is None:
            continue
        node = expression_before(source, own, span) if own else source.expression_at(span)
        if node is not None and source.function_of(node) is not None:
            yield source, node


def promotions(
    trial: Trial, sources: Sources, edits: Edits = (), *, raised: bool = True
) -> Iterator[tuple[Source, Promotion]]:
    """The lines, of the original sources, at which runs that raised, or that passed, made FP32 values, the first first."""
    runs = [run for run in trial.runs.values() if (run.error is None) is raised]
    found = dict.fromkeys(one for run in runs for one in run.promotions)
    for one in found:
        source = sources.of(one.file)
        own = [edit for edit in edits if edit.file == one.file]
        if source is None:
            continue
        offset = Source(one.file, source.apply(own)).offset(one.line, 0) if own else source.offset(one.line, 0)
        yield source, one._replace(line=source.place_of_offset(original_offset(offset, own))[0])
