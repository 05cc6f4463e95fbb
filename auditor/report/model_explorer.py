"""Writes the audited graph, and an overlay for each measure, as JSON for Google's Model Explorer.

Overlays refer to nodes by name, so the graph is written together with the overlays: a graph that Model Explorer derives
from a saved program may have other names.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from itertools import cycle
from typing import Any

from ..numerics.formats import auditable
from ..records import NodeReport
from ..records.audit import Audit
from .kept import computed_in
from .words import compact, label, line, magnitude, op, printable

VERSION = 1
"""Schema version, increased when a field changes its meaning or is removed; see docs/model-explorer.schema.json."""
GRAPH = "graph"
RAMP = ("#fdf1d8", "#e08a3c", "#9c2f0d")
VERDICT_COLORS = {"safe": "#dfe9ef", "sensitive": "#f6c667", "unsafe": "#e0674e", "untested": "#d9d8d4"}
FP32_COLOR = "#b9d3ee"
LOW_COLORS = ("#f0cf9f", "#bfe3d4", "#e3c5e8", "#cfd8a8")


def files(audit: Audit) -> dict[str, str]:
    """{file name: text}: `graph.json`, and the overlays, for Model Explorer's option --node_data_paths."""
    documents = {"graph.json": graph(audit)}
    stops = [{"stop": i / (len(RAMP) - 1), "bgColor": color} for i, color in enumerate(RAMP)]
    for fmt in audit.formats:
        ranked = {name: {"value": round(value, 3)} for name, value in _logarithms(audit, fmt).items()}
        title = f"{label(fmt)}: change of the outputs"
        documents[f"{fmt}_effect.json"] = _overlay(title, ranked, {"gradient": stops})
        verdicts = {r.node.name: r.verdicts[fmt].verdict for r in audit.nodes if fmt in r.verdicts}
        colors_of_verdicts = _colors(verdicts, VERDICT_COLORS)
        documents[f"{fmt}_verdict.json"] = _overlay(f"{label(fmt)} verdict", colors_of_verdicts)
    if audit.recommended in audit.plans:
        colors = {"fp32": FP32_COLOR, **dict(zip(auditable(), cycle(LOW_COLORS), strict=False))}
        computed = {r.node.name: computed_in(r) for r in audit.nodes}
        documents["plan.json"] = _overlay(f"plan {audit.recommended}", _colors(computed, colors))
    return {name: json.dumps(made, indent=1, allow_nan=False) + "\n" for name, made in documents.items()}


def _logarithms(audit: Audit, fmt: str) -> dict[str, float]:
    """{operation: log10 of its effect}, since effects span many orders of magnitude; Inf and NaN rank above all finite
    effects, and effects of 0 are left out."""
    effects = {r.node.name: r.contributions[fmt].isolated for r in audit.nodes if fmt in r.contributions}
    result = {name: math.log10(value) for name, value in effects.items() if math.isfinite(value) and value > 0}
    top = max(result.values(), default=0.0) + 1
    result |= {name: top for name, value in effects.items() if not math.isfinite(value)}
    return result


def graph(audit: Audit) -> dict[str, Any]:
    """The graph in Model Explorer's format: every operation under its module, with measurements as attributes."""
    known = {report.node.name for report in audit.nodes}
    return {
        "label": printable(audit.subject.name),
        "graphs": [
            {
                "id": GRAPH,
                "groupNodeAttributes": {"": {"auditor format_version": str(VERSION), "command": audit.command}},
                "nodes": [_node(report, audit.formats, known) for report in audit.nodes],
            }
        ],
    }


def _node(report: NodeReport, formats: tuple[str, ...], known: set[str]) -> dict[str, Any]:
    node = report.node
    attributes = {
        "module": f"{node.owner} ({node.owner_type})",
        "source": line(node.source, node.called_from),
        "shape": "x".join(map(str, node.shape)),
        "FLOPs": compact(report.flops),
        "max |x|": magnitude(report.range.max_abs) if report.range else "",
        "rules": ", ".join(report.findings),
        **{f"{label(f)} verdict": report.verdicts[f].verdict for f in formats if f in report.verdicts},
        **{f"{label(f)} reason": report.verdicts[f].reason for f in formats if f in report.verdicts},
    }
    return {
        "id": node.name,
        "label": printable(op(node.op)),
        "namespace": "/".join(printable(part).replace("/", "_") for part in node.owner.split(".") if part),
        "attrs": [{"key": key, "value": printable(value)} for key, value in attributes.items() if value],
        "incomingEdges": [
            {"sourceNodeId": name, "sourceNodeOutputId": "0", "targetNodeInputId": str(i)}
            for i, name in enumerate(node.inputs)
            if name in known
        ],
    }


def _overlay(name: str, results: Mapping[str, Any], shown: Mapping[str, Any] | None = None) -> dict[str, Any]:
    beside = shown or {"showExpandedSummaryOnGroupNode": True}
    return {GRAPH: {"name": name, "formatVersion": VERSION, "results": results, **beside}}


def _colors(words: Mapping[str, str | None], colors: Mapping[str, str]) -> dict[str, dict[str, str]]:
    known = {name: word for name, word in words.items() if word in colors}
    return {n: {"value": word, "bgColor": colors[word], "textColor": "#1c1f24"} for n, word in known.items() if word}
