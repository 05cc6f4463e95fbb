"""Converts an Audit to plain data and to the text of its files; equal audits give equal bytes."""

from __future__ import annotations

import functools
import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import is_dataclass, replace
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from pydantic import TypeAdapter

from ..capture.places import portable, portable_path
from ..records.audit import FORMAT_VERSION, Audit
from ..records.written import FileField
from .compare import contributions_of

PLAN, MEASUREMENTS = "plan.json", "measurements.json"
WIDTH = 240
VARYING = ("seconds", "held")
"""Keys of `environment` that older files have, and that differ between two audits of the same model."""


@functools.cache
def adapter(record: Any = Audit) -> TypeAdapter[Any]:
    """The pydantic TypeAdapter of a record class; cached."""
    return TypeAdapter(record)


def texts(audit: Audit) -> dict[str, str]:
    """The texts of plan.json and measurements.json, by file name."""
    return {PLAN: laid_out(to_plan(audit)) + "\n", MEASUREMENTS: laid_out(to_measurements(audit), 2) + "\n"}


def to_plan(audit: Audit) -> dict[str, Any]:
    """The contents of plan.json: measured numbers have seven significant digits; Inf and NaN are texts."""
    result = adapter().dump_python(_portable(audit), mode="json", exclude=measured_fields(Audit))
    return {"format_version": FORMAT_VERSION, **result}


def to_measurements(audit: Audit) -> dict[str, Any]:
    """The contents of measurements.json: measured numbers have seven significant digits; Inf and NaN are texts."""
    result = adapter().dump_python(_portable(audit), mode="json", include=measured_fields(Audit))
    return {"format_version": FORMAT_VERSION, "plan": digest(to_plan(audit)), **result}


def to_document(audit: Audit) -> dict[str, Any]:
    """The contents of plan.json and measurements.json in one dict."""
    return {"format_version": FORMAT_VERSION, **adapter().dump_python(_portable(audit), mode="json")}


def merge(plan: Any, measurements: Any) -> Any:
    """Combine the contents of plan.json and measurements.json; plan.json wins if they disagree."""
    if isinstance(plan, Mapping) and isinstance(measurements, Mapping):
        return {**measurements, **{key: merge(item, measurements.get(key)) for key, item in plan.items()}}
    if isinstance(plan, list) and isinstance(measurements, list) and len(plan) == len(measurements):
        return [merge(*both) for both in zip(plan, measurements, strict=True)]
    return plan


@functools.cache
def measured_fields(type_: Any) -> Mapping[str, Any]:
    """The fields of a record that belong in measurements.json, in pydantic's include/exclude form."""
    if not is_dataclass(type_):
        result = next(filter(None, map(measured_fields, get_args(type_))), {})
        return {"__all__": result} if result and get_origin(type_) in (tuple, Mapping) else result
    fields: dict[str, Any] = {}
    for name, hint in get_type_hints(type_, include_extras=True).items():
        marks = hint.__metadata__ if get_origin(hint) is Annotated else ()
        if any(isinstance(mark, FileField) and mark.measured for mark in marks):
            fields[name] = True
        elif any(isinstance(mark, FileField) for mark in marks) and (below := measured_fields(get_args(hint)[0])):
            fields[name] = below
    return fields


def steady(plan: Any) -> Any:
    """The contents of plan.json without the fields of older files that differ between two audits of the same model."""
    environment = plan.get("environment") if isinstance(plan, Mapping) else None
    if not isinstance(environment, Mapping):
        return plan
    return {**plan, "environment": {key: value for key, value in environment.items() if key not in VARYING}}


def digest(plan: Any) -> str:
    """SHA-256 of plan.json's contents; measurements.json stores it to show that both were written together."""
    text = json.dumps(steady(plan), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def _portable(audit: Audit) -> Audit:
    """A copy of the audit with paths that do not depend on the machine."""
    about = audit.subject
    subject = replace(
        about,
        target=portable(about.target),
        file=portable_path(about.file) if about.file else None,
        inputs_source=portable(about.inputs_source),
        weights_source=portable(about.weights_source),
    )
    nodes = []
    for report in audit.nodes:
        source, caller = (path and portable_path(path) for path in (report.node.source_path, report.node.caller_path))
        nodes.append(replace(report, node=replace(report.node, source_path=source, caller_path=caller)))
    return replace(audit, subject=subject, nodes=tuple(nodes), contributions=contributions_of(audit))


def laid_out(value: Any, deepest: float = math.inf, depth: int = 0, before: int = 0) -> str:
    """Format JSON: a list or an object takes one line if it has at most WIDTH characters or is nested `deepest` levels
    deep; otherwise each item starts a line. before: characters already on the line."""
    short = json.dumps(value)
    fits = depth >= deepest or before + depth + len(short) <= WIDTH
    if fits or not value or not isinstance(value, dict | list):
        return short
    start, end, items = "[", "]", [("", item) for item in value]
    if isinstance(value, dict):
        start, end, items = "{", "}", [(f"{json.dumps(key)}: ", item) for key, item in value.items()]
    lines = [f"\n{' ' * (depth + 1)}{name}{laid_out(item, deepest, depth + 1, len(name))}" for name, item in items]
    return f"{start}{','.join(lines)}\n{' ' * depth}{end}"
