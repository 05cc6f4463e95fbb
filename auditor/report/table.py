"""The layer table in columns: one array per field, with shared strings, so that thousands of rows take little space."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ..numerics.formats import FORMATS
from ..records import Contribution, Magnitudes, NodeError, NodeReport, Verdict
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
        return strings.setdefault((text or "")[:most], len(strings))

    nodes = audit.nodes
    at = {r.node.name: i for i, r in enumerate(nodes)}  # {operation: its row}
    plan = audit.plans.get(audit.recommended or "")
    why = why_raised(plan) if plan else None

    def rows_read(i: int, report: NodeReport) -> list[int]:
        """The rows whose results an operation reads, as distances from its own row, which have fewer digits."""
        names = dict.fromkeys(report.node.inputs)
        return [i - at[name] for name in names if name in at]

    def reason_for_fp32(report: NodeReport) -> str:
        return why(report) if why else ""

    # `add` numbers the texts in the order in which the columns below ask for them.
    return {
        "formats": [{"key": f, "label": label(f), "largest": FORMATS[f].largest} for f in audit.formats],
        "verdicts": list(VERDICTS),
        "budget": audit.max_error,
        "name": [r.node.name for r in nodes],
        "op": [add(r.node.op) for r in nodes],
        "owner": [add(r.node.owner) for r in nodes],
        "type": [add(r.node.owner_type) for r in nodes],
        "source": [add(line(r.node.source, r.node.called_from)) for r in nodes],
        "code": [add(r.node.code, LONGEST) for r in nodes],
        "shape": [add("×".join(map(str, r.node.shape))) for r in nodes],
        "max": [_largest(r.range) for r in nodes],
        "min": [_smallest(r.range) for r in nodes],
        "flops": [r.flops for r in nodes],
        "histogram": [_histogram(r.range) for r in nodes],
        "plan": [add(_planned_format(r)) for r in nodes],
        "dtypes": [add(_dtypes(r)) for r in nodes],
        "why": [add(reason_for_fp32(r), LONGEST) for r in nodes],
        "reads": [rows_read(i, r) for i, r in enumerate(nodes)],
        "inputs": _inputs(audit),
        "outputs": [at[name] for name in audit.graph_outputs if name in at],
        "classes": dict(audit.classes),
        "measures": measures(audit.formats, planned=plan is not None),
        "rules": {str(i): list(r.findings) for i, r in enumerate(nodes) if r.findings},
        "cells": {fmt: _cells(nodes, fmt, add, audit.max_error) for fmt in audit.formats},
        "folds": folds(nodes),
        "strings": list(strings),
    }


def _largest(magnitudes: Magnitudes | None) -> float | str | None:
    return _number(None if magnitudes is None else magnitudes.max_abs, 3)


def _smallest(magnitudes: Magnitudes | None) -> float | str | None:
    return _number(None if magnitudes is None else magnitudes.min_abs)


def _planned_format(report: NodeReport) -> str:
    """The label of the format in which an operation computes under the recommended plan; "" if there is none."""
    low = computed_in(report)
    return label(low) if low else ""


def _cells(nodes: Sequence[NodeReport], fmt: str, add: Callable[..., int], budget: float) -> dict[str, Any]:
    """The columns of one format: an entry for each operation, except for `events`, which only some operations have."""
    errors = [r.errors.get(fmt) for r in nodes]
    effects = [r.contributions.get(fmt) for r in nodes]
    verdicts = [r.verdicts.get(fmt) for r in nodes]
    reasons = []
    for verdict, effect in zip(verdicts, effects, strict=True):
        reasons.append(add(_reason_shown(verdict, effect, budget), LONGEST))
    predicted = [effect is not None and effect.decided_by in ("first-order", "not-run") for effect in effects]
    events = {}
    for i, error in enumerate(errors):
        if error is not None and _has_event(error):
            events[str(i)] = [error.overflow, error.nan, _number(error.underflow), add(error.unsupported, LONGEST)]
    return {
        "effect": [_number(None if effect is None else effect.isolated) for effect in effects],
        "own": [_number(None if effect is None else effect.own) for effect in effects],
        "local": [_number(None if error is None else error.local_error) for error in errors],
        "propagated": [_number(None if error is None else error.propagated_error) for error in errors],
        "reason": reasons,
        "verdict": "".join("-" if verdict is None else str(VERDICTS.index(verdict.verdict)) for verdict in verdicts),
        "predicted": "".join("1" if yes else "0" for yes in predicted),
        "events": events,
    }


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
    rows = [("name", "plan", "Format under the recommended plan", "Plan", "")] * planned
    each = (
        ("verdict", "verdict", "verdict"),
        ("effect", "effect", "change of the output"),
        ("most", "local", "local error"),
        ("most", "propagated", "propagated error"),
    )
    rows += [(kind, column, f"{label(f)}: {words}", words, f) for f in formats for kind, column, words in each]
    rows += [("most", "max", "Largest |x|", "Max |x|", ""), ("total", "flops", "FLOPs", "FLOPs", "")]
    keys = ("kind", "column", "label", "short", "format")
    return [{key: value for key, value in zip(keys, row, strict=True) if value} for row in rows]


def _inputs(audit: Audit) -> list[dict[str, Any]]:
    """The model's inputs, each with its readers; with dtype and shape if every input tensor is in the graph."""
    names, known = audit.graph_inputs, audit.inputs
    shapes = known if len(known) == len(names) else [""] * len(names)
    readers = {name: [i for i, r in enumerate(audit.nodes) if name in r.node.inputs] for name in names}
    return [{"name": name, "shape": shape, "into": readers[name]} for name, shape in zip(names, shapes, strict=True)]


def _number(value: float | None, digits: int = 2) -> float | str | None:
    if value is None or math.isfinite(value):
        return None if value is None else float(f"{value:.{digits}g}")
    return str(value)


def _histogram(span: Magnitudes | None) -> str:
    """`first exponent:digits`, a base-36 digit for each power of two: its count on a logarithmic scale, 0 if none."""
    if span is None or not span.exponents:
        return ""
    first, last = min(span.exponents), max(span.exponents)
    top = math.log1p(max(span.exponents.values()))
    heights = (math.log1p(span.exponents.get(e, 0)) / top if top else 0 for e in range(first, last + 1))
    return f"{first}:" + "".join(DIGITS[math.ceil(35 * h)] for h in heights)


def folds(nodes: Iterable[NodeReport]) -> list[list[str]]:
    """Lists of at least FOLD_FROM consecutive numbered sibling modules with the same operations."""
    inside: dict[tuple[str, int], list[tuple[str, str]]] = {}
    for report in nodes:
        parts = report.node.owner.split(".")
        for depth, part in enumerate(parts):
            if part.isdecimal():
                key = ".".join(parts[:depth]), int(part)
                inside.setdefault(key, []).append((".".join(parts[depth + 1 :]), report.node.op))
    runs: list[list[tuple[str, int]]] = []
    for key in sorted(inside):
        before = key[0], key[1] - 1
        if runs and runs[-1][-1] == before and inside[before] == inside[key]:
            runs[-1].append(key)
        else:
            runs.append([key])
    return [[f"{parent}.{n}".lstrip(".") for parent, n in run] for run in runs if len(run) >= FOLD_FROM]
