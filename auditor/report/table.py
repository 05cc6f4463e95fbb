"""The layer table in columns: one array per field, with shared strings, so that thousands of rows take little space."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

from ..numerics.formats import FORMATS
from ..records import Magnitudes, NodeReport
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
    plan, at = audit.plans.get(audit.recommended or ""), {r.node.name: i for i, r in enumerate(nodes)}
    why = why_raised(plan) if plan else None
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
        "max": [_number(r.range.max_abs if r.range else None, 3) for r in nodes],
        "min": [_number(r.range.min_abs if r.range else None) for r in nodes],
        "flops": [r.flops for r in nodes],
        "histogram": [_histogram(r.range) for r in nodes],
        "plan": [add(label(low) if (low := computed_in(r)) else "") for r in nodes],
        "dtypes": [add(_dtypes(r)) for r in nodes],
        "why": [add(why(r) if why else "", LONGEST) for r in nodes],
        "reads": [
            [i - at[name] for name in dict.fromkeys(r.node.inputs) if name in at] for i, r in enumerate(nodes)
        ],  # as differences, which have fewer digits than positions
        "inputs": _inputs(audit),
        "outputs": [at[name] for name in audit.graph_outputs if name in at],
        "classes": dict(audit.classes),
        "measures": measures(audit.formats, planned=plan is not None),
        "rules": {str(i): list(r.findings) for i, r in enumerate(nodes) if r.findings},
        "cells": {fmt: _cells(nodes, fmt, add, audit.max_error) for fmt in audit.formats},
        "folds": folds(nodes),
        "strings": list(strings),
    }


def _cells(nodes: Iterable[NodeReport], fmt: str, add: Callable[..., int], budget: float) -> dict[str, Any]:
    rows = [(r.errors.get(fmt), r.contributions.get(fmt), r.verdicts.get(fmt)) for r in nodes]
    plain = [v is None or (v.verdict == "safe" and (moved is None or moved.isolated <= budget)) for _, moved, v in rows]
    predicted = (moved is not None and moved.decided_by in ("first-order", "not-run") for _, moved, _ in rows)
    return {
        "effect": [_number(moved.isolated if moved else None) for _, moved, _ in rows],
        "own": [_number(moved.own if moved else None) for _, moved, _ in rows],
        "local": [_number(error.local_error if error else None) for error, _, _ in rows],
        "propagated": [_number(error.propagated_error if error else None) for error, _, _ in rows],
        "reason": [
            add(v.reason if v and not left else "", LONGEST) for (_, _, v), left in zip(rows, plain, strict=True)
        ],
        "verdict": "".join(str(VERDICTS.index(v.verdict)) if v else "-" for _, _, v in rows),
        "predicted": "".join("1" if yes else "0" for yes in predicted),
        "events": {
            str(i): [e.overflow, e.nan, _number(e.underflow), add(e.unsupported, LONGEST)]
            for i, (e, _, _) in enumerate(rows)
            if e is not None and (e.overflow or e.nan or e.underflow >= VISIBLE or e.unsupported)
        },
    }


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
