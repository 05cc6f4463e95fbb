"""The layer table in columns: one array per field, with shared strings, so that thousands of rows take little space."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ..numerics.formats import FORMATS
from ..records import Contribution, Magnitudes, NodeError, NodeReport, Plan, Verdict
from ..records.audit import Audit
from .kept import computed_in, dtype_label, why_raised
from .words import VERDICTS, label, line

LONGEST = 200
"""Maximum characters of a reason or a source line in the table; the JSON files have the full text."""
VISIBLE = 1e-4
"""Minimum share of values that underflow to zero from which the table shows this share."""
FOLD_FROM = 3
"""Minimum number of consecutive sibling modules with the same operations that the table folds."""
DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"


def table(audit: Audit) -> dict[str, Any]:
    """Build the columns of the layer table as JSON types; Inf and NaN become the strings `inf` and `nan`."""
    strings: dict[str, int] = {"": 0}

    def add(text: str | None, most: int | None = None) -> int:
        """Return the index of a text in `strings`; cells contain the index."""
        shown = (text or "")[:most]
        return strings.setdefault(shown, len(strings))

    reports = audit.nodes
    rows = {report.node.name: row for row, report in enumerate(reports)}  # {operation: its row}
    plan = audit.plans.get(audit.recommended or "")

    # The order of the columns below decides the order of `strings`.
    return {
        "formats": [_format_entry(fmt) for fmt in audit.formats],
        "verdicts": list(VERDICTS),
        "budget": audit.max_error,
        **_identity_columns(reports, add),
        **_range_columns(reports),
        **_plan_columns(reports, plan, add),
        "reads": [_rows_read(report, rows) for report in reports],
        "inputs": _inputs(audit),
        "outputs": [rows[name] for name in audit.graph_outputs if name in rows],
        "classes": dict(audit.classes),
        "measures": measures(audit.formats, planned=plan is not None),
        "rules": _rules_by_row(reports),
        "cells": {fmt: _cells(reports, fmt, add, audit.max_error) for fmt in audit.formats},
        "folds": folds(reports),
        "strings": list(strings),
    }


def _format_entry(fmt: str) -> dict[str, Any]:
    return {"key": fmt, "label": label(fmt), "largest": FORMATS[fmt].largest}


def _identity_columns(reports: Sequence[NodeReport], add: Callable[..., int]) -> dict[str, list[Any]]:
    """The columns that say what an operation is, and which source line calls it."""
    nodes = [report.node for report in reports]
    return {
        "name": [node.name for node in nodes],
        "op": [add(node.op) for node in nodes],
        "owner": [add(node.owner) for node in nodes],
        "type": [add(node.owner_type) for node in nodes],
        "source": [add(line(node.source, node.called_from)) for node in nodes],
        "code": [add(node.code, LONGEST) for node in nodes],
        "shape": [add("×".join(map(str, node.shape))) for node in nodes],
    }


def _range_columns(reports: Sequence[NodeReport]) -> dict[str, list[Any]]:
    """The columns of the results' magnitudes in FP32, and of the FLOPs."""
    ranges = [report.range for report in reports]
    return {
        "max": [_largest(magnitudes) for magnitudes in ranges],
        "min": [_smallest(magnitudes) for magnitudes in ranges],
        "flops": [report.flops for report in reports],
        "histogram": [_histogram(magnitudes) for magnitudes in ranges],
    }


def _plan_columns(reports: Sequence[NodeReport], plan: Plan | None, add: Callable[..., int]) -> dict[str, list[int]]:
    """The columns of the formats and dtypes under the recommended plan, and of the reasons for FP32."""
    why = why_raised(plan) if plan else None

    def reason_for_fp32(report: NodeReport) -> str:
        return why(report) if why else ""

    return {
        "plan": [add(_planned_format(report)) for report in reports],
        "dtypes": [add(_dtypes(report)) for report in reports],
        "why": [add(reason_for_fp32(report), LONGEST) for report in reports],
    }


def _rows_read(report: NodeReport, rows: Mapping[str, int]) -> list[int]:
    """The rows whose results an operation reads, as distances from its own row, which have fewer digits."""
    own = rows[report.node.name]
    names = dict.fromkeys(report.node.inputs)
    return [own - rows[name] for name in names if name in rows]


def _rules_by_row(reports: Sequence[NodeReport]) -> dict[str, list[str]]:
    """{row: its findings' rules} of the operations with findings."""
    return {str(row): list(report.findings) for row, report in enumerate(reports) if report.findings}


def _largest(magnitudes: Magnitudes | None) -> float | str | None:
    return _number(None if magnitudes is None else magnitudes.max_abs, 3)


def _smallest(magnitudes: Magnitudes | None) -> float | str | None:
    return _number(None if magnitudes is None else magnitudes.min_abs)


def _planned_format(report: NodeReport) -> str:
    """The label of the format in which an operation computes under the recommended plan; "" if there is none."""
    low = computed_in(report)
    return label(low) if low else ""


def _cells(reports: Sequence[NodeReport], fmt: str, add: Callable[..., int], budget: float) -> dict[str, Any]:
    """The columns of one format: an entry for each operation, except for `events`, which only some operations have."""
    errors = [report.errors.get(fmt) for report in reports]
    effects = [report.contributions.get(fmt) for report in reports]
    verdicts = [report.verdicts.get(fmt) for report in reports]
    reasons = list[int]()
    for verdict, effect in zip(verdicts, effects, strict=True):
        reason = _reason_shown(verdict, effect, budget)
        reasons.append(add(reason, LONGEST))
    events = dict[str, list[Any]]()
    for row, error in enumerate(errors):
        if error is not None and _has_event(error):
            why_unsupported = add(error.unsupported, LONGEST)
            events[str(row)] = [error.overflow, error.nan, _number(error.underflow), why_unsupported]
    return {
        "effect": [_number_of(effect, "isolated") for effect in effects],
        "own": [_number_of(effect, "own") for effect in effects],
        "local": [_number_of(error, "local_error") for error in errors],
        "propagated": [_number_of(error, "propagated_error") for error in errors],
        "reason": reasons,
        "verdict": "".join(map(_verdict_digit, verdicts)),
        "predicted": "".join(map(_predicted_digit, effects)),
        "events": events,
    }


def _number_of(record: NodeError | Contribution | None, field: str) -> float | str | None:
    """A number of a record as the table shows it; None without the record."""
    if record is None:
        return None
    return _number(getattr(record, field))


def _verdict_digit(verdict: Verdict | None) -> str:
    """The index of a verdict in VERDICTS; "-" without one."""
    if verdict is None:
        return "-"
    return str(VERDICTS.index(verdict.verdict))


def _predicted_digit(effect: Contribution | None) -> str:
    """ "1" for an effect that was predicted, not measured by a run."""
    is_predicted = effect is not None and effect.decided_by in ("first-order", "not-run")
    return "1" if is_predicted else "0"


def _reason_shown(verdict: Verdict | None, effect: Contribution | None, budget: float) -> str:
    """The reason of a verdict; "" for an operation that is safe and whose effect is within the error budget."""
    if verdict is None:
        return ""
    is_within = effect is None or effect.isolated <= budget
    if verdict.verdict == "safe" and is_within:
        return ""
    return verdict.reason


def _has_event(error: NodeError) -> bool:
    """Whether an operation overflows, gives NaN, underflows in a visible share of values, or cannot run."""
    if error.overflow or error.nan or error.unsupported:
        return True
    return error.underflow >= VISIBLE


def _dtypes(report: NodeReport) -> str:
    """`input dtypes|computing dtype|result dtype` under the recommended plan."""
    ran = report.planned
    if ran is None:
        return ""
    return "|".join((" ".join(map(dtype_label, ran.inputs)), dtype_label(ran.computed), dtype_label(ran.output)))


def measures(formats: tuple[str, ...], *, planned: bool = True) -> list[dict[str, str]]:
    """The measures that can color the graph, the default first. kind: how measures.js summarizes a module.

    A new numeric column needs a row here. `column`: the column's key in the table, or in a format's cells.
    """
    of_format = (
        ("verdict", "verdict", "verdict"),
        ("effect", "effect", "change of the output"),
        ("most", "local", "local error"),
        ("most", "propagated", "propagated error"),
    )
    rows = list[tuple[str, str, str, str, str]]()
    if planned:
        rows.append(("name", "plan", "Format under the recommended plan", "Plan", ""))
    for fmt in formats:
        for kind, column, words in of_format:
            rows.append((kind, column, f"{label(fmt)}: {words}", words, fmt))
    rows.append(("most", "max", "Largest |x|", "Max |x|", ""))
    rows.append(("total", "flops", "FLOPs", "FLOPs", ""))
    return [_measure_entry(row) for row in rows]


def _measure_entry(row: tuple[str, ...]) -> dict[str, str]:
    """A row of `measures` as a dict without its empty fields."""
    keys = ("kind", "column", "label", "short", "format")
    return {key: value for key, value in zip(keys, row, strict=True) if value}


def _inputs(audit: Audit) -> list[dict[str, Any]]:
    """The model's inputs, each with its readers; with dtype and shape if every input tensor is in the graph."""
    names = audit.graph_inputs
    shapes: Sequence[str] = audit.inputs
    if len(shapes) != len(names):
        shapes = [""] * len(names)
    entries = list[dict[str, Any]]()
    for name, shape in zip(names, shapes, strict=True):
        readers = [row for row, report in enumerate(audit.nodes) if name in report.node.inputs]
        entries.append({"name": name, "shape": shape, "into": readers})
    return entries


def _number(value: float | None, digits: int = 2) -> float | str | None:
    if value is None:
        return None
    if not math.isfinite(value):
        return str(value)
    return float(f"{value:.{digits}g}")


def _histogram(magnitudes: Magnitudes | None) -> str:
    """`first exponent:digits`, a base-36 digit for each power of two: its count on a logarithmic scale, 0 if none."""
    if magnitudes is None or not magnitudes.exponents:
        return ""
    counts = magnitudes.exponents
    first = min(counts)
    last = max(counts)
    top = math.log1p(max(counts.values()))
    digits = ""
    for exponent in range(first, last + 1):
        height = math.log1p(counts.get(exponent, 0)) / top if top else 0
        digits += DIGITS[math.ceil(35 * height)]
    return f"{first}:{digits}"


def folds(reports: Iterable[NodeReport]) -> list[list[str]]:
    """Lists of at least FOLD_FROM consecutive numbered sibling modules with the same operations."""
    operations = _operations_of_numbered(reports)
    runs = list[list[tuple[str, int]]]()
    for parent, number in sorted(operations):
        own = (parent, number)
        before = (parent, number - 1)
        continues = bool(runs) and runs[-1][-1] == before
        if continues and operations[before] == operations[own]:
            runs[-1].append(own)
        else:
            runs.append([own])
    long_runs = [run for run in runs if len(run) >= FOLD_FROM]
    return [[f"{parent}.{number}".lstrip(".") for parent, number in run] for run in long_runs]


def _operations_of_numbered(reports: Iterable[NodeReport]) -> dict[tuple[str, int], list[tuple[str, str]]]:
    """{(parent, number of a child module): (path inside the child, operation) of every operation inside}."""
    inside = dict[tuple[str, int], list[tuple[str, str]]]()
    for report in reports:
        parts = report.node.owner.split(".")
        for depth, part in enumerate(parts):
            if not part.isdecimal():
                continue
            parent = ".".join(parts[:depth])
            path_inside = ".".join(parts[depth + 1 :])
            inside.setdefault((parent, int(part)), []).append((path_inside, report.node.op))
    return inside
