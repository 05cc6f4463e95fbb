"""An Audit made again from its files."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields, replace
from os import PathLike
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from torch import nn

from ..errors import PlanError
from ..folder import path_of
from ..loading.caveats import RANDOM_WEIGHTS, SYNTHETIC_INPUTS
from ..records import Audit, Origin, Plan, Subject
from ..records.written import ByFormat, Inlined, Written
from .contents import FORMS
from .parts import MEASUREMENTS, inner, is_record, marked, nullable
from .read import AGAIN, json_path, loaded, measured_beside, plan_in, read_all, read_audit, read_measurements

ALONE = (
    "This audit was read from its plan.json alone: operations, weights and regions are in measurements.json, which is not "
    "beside it."
)


class Absent(nn.Module):
    """Stands where the model of an audit was that was loaded from files."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Raises: PlanError."""
        raise PlanError(
            "the audit was loaded from its files, which hold no model: build yours, and auditor.apply(model, audit)",
            slug="no-model-here",
        )


def load(directory: str | PathLike[str]) -> Audit:
    """The audit that was saved into a directory, or whose plan.json this is.

    Absent are the model, its inputs, and what only a run can use of an operation; numbers have the
    digits of the files. Without measurements.json there are no operations.
    Raises: PlanError(slug="missing-plan" | "bad-plan").
    """
    path = path_of(directory, "the directory of an audit")
    document = loaded(path)
    read_audit(document, str(path))
    measured = measured_beside(path, document)
    if measured is None:
        _refuse_of_another(path)
    odd = read_measurements(measured, str(path), document).not_finite if measured else None
    whole = _whole(document, measured or {})
    read_all(whole, str(path))
    return _audit(_with_odd(whole, odd or {}, str(path)), str(path), alone=measured is None)


def _refuse_of_another(path: Path) -> None:
    file = plan_in(path).parent / MEASUREMENTS
    if file.exists():
        raise PlanError(
            f"{file} was written with another plan.json than the one beside it: audit the model again, or take it away to "
            "load the plan alone.",
            slug="bad-plan",
        )


def _whole(plan: Mapping[str, Any], measured: Mapping[str, Any]) -> dict[str, Any]:
    """Both in one document; where both have something, it is an object of which each has a share."""
    whole = {**measured, **{key: item for key, item in plan.items() if key != "findings"}}
    for key, item in plan.items():
        share = measured.get(key)
        if isinstance(item, Mapping) and isinstance(share, Mapping):
            whole[key] = _together(item, share)
    if "findings" not in whole:
        whole["findings"] = [{**kind, "owner": owner} for kind in plan["findings"] for owner in _owners(kind)]
    return whole


def _together(plan: Mapping[str, Any], measured: Mapping[str, Any]) -> dict[str, Any]:
    """An object of both files; what plan.json says stands."""
    found = {**measured, **plan}
    for key in plan.keys() & measured.keys():
        if isinstance(plan[key], Mapping) and isinstance(measured[key], Mapping):
            found[key] = _together(plan[key], measured[key])
    return {key: found[key] for key in (*plan, *(key for key in measured if key not in plan))}


def _owners(kind: Mapping[str, Any]) -> list[str]:
    return [kind["owner"], *(kind.get("also_in") or ())]


def _with_odd(whole: dict[str, Any], odd: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The document with what is not finite in its places."""
    changed: dict[str, Any] = json.loads(json.dumps(whole))
    for name, pointers in odd.items():
        for pointer in pointers:
            holder, key = _place(changed, pointer)
            if holder is None or name not in ("inf", "-inf", "nan"):
                raise PlanError(
                    f"{where}: `$.not_finite` leads to no null of the files, at {pointer[:80]!r}. {AGAIN}.",
                    slug="bad-plan",
                )
            holder[key] = float(name)
    return changed


def _place(document: Any, pointer: str) -> tuple[Any, Any]:
    """What holds a null, and under which key; (None, None) where there is none."""
    at: Any = document
    *way, last = [step.replace("~1", "/").replace("~0", "~") for step in pointer.split("/")[1:]] or [""]
    for step in way:
        key = _key(at, step)
        if key is None:
            return None, None
        at = at[key]
    key = _key(at, last)
    return (None, None) if key is None or at[key] is not None else (at, key)


def _key(holder: Any, step: str) -> Any:
    if isinstance(holder, list):
        return int(step) if step.isascii() and step.isdecimal() and len(step) < 9 and int(step) < len(holder) else None
    return step if isinstance(holder, dict) and step in holder else None


def _audit(found: Mapping[str, Any], where: str, alone: bool) -> Audit:
    given = found["subject"]
    said = [text for text in found.get("warnings") or () if text not in (RANDOM_WEIGHTS, SYNTHETIC_INPUTS)]
    known: dict[str, Any] = {
        "subject": _subject(given),
        "parameters": given.get("parameters") or 0,
        "inputs": tuple(given.get("inputs") or ()),
        "structure": given.get("structure") or "",
        "tied_parameters": tuple(map(tuple, given.get("tied_parameters") or ())),
        "shared_modules": tuple(map(tuple, given.get("shared_modules") or ())),
        "formats": tuple(found.get("formats") or _formats(found)),
        "max_error": found["budget"].get("max_error") or math.nan,
        "metric": found["budget"].get("metric") or "",
        "criteria": tuple(found["budget"].get("criteria") or ()),
        "capture_method": given.get("capture") or "run",
        "warnings": (*said, *([ALONE] if alone else [])),
    }
    audit: Audit = _record(Audit, found, known)
    for name in audit.plans:
        if "" not in audit.plans[name].scopes:
            at = json_path(("plans", name, "scopes", ""))
            raise PlanError(f"{where}: `{at}` is missing. {AGAIN}.", slug="bad-plan")
    return replace(audit, plans={name: replace(plan, name=name) for name, plan in audit.plans.items()})


def _formats(found: Mapping[str, Any]) -> list[str]:
    return list(dict.fromkeys(plan["format"] for plan in found["plans"].values()))


def _subject(given: Mapping[str, Any]) -> Subject:
    return Subject(
        model=Absent(),
        batches=(),
        name=given.get("name") or "",
        target=given.get("source") or "",
        inputs_source=given.get("inputs_source") or "",
        weights_source=given.get("weights_source") or "",
        origin=Origin(given["file"], None, "", "") if given.get("file") else None,
        synthetic_inputs=bool(given.get("synthetic_inputs")),
        random_weights=bool(given.get("random_weights")),
        present=False,
    )


def _record(record: Any, found: Mapping[str, Any], known: Mapping[str, Any] = {}) -> Any:
    """A record from its object. known: fields that are not read from it."""
    values = dict(known)
    marks = {field.name: (type_, given) for field, type_, given in marked(record)}
    hints = get_type_hints(record)
    for field in fields(record):
        if field.name in values:
            continue
        type_, given = marks.get(field.name, (hints[field.name], {}))
        values[field.name] = _field(field, type_, given, found)
    return record(**values)


def _field(field: Field[Any], type_: Any, marks: Mapping[type, Any], found: Mapping[str, Any]) -> Any:
    written = marks.get(Written)
    if ByFormat in marks:
        return _by_format(field, get_args(type_)[1], written, found)
    if Inlined in marks:
        within = _record(inner(type_), found)
        return within if not nullable(type_) or _any_of(inner(type_), found) else None
    key = (written.key or field.name) if written else field.name
    if written is None or key not in found:
        return _default(field, type_)
    if written.form:
        return None if found[key] is None else _formed(written.form, found[key])
    return _value(type_, found[key])


def _any_of(record: Any, found: Mapping[str, Any]) -> bool:
    """Whether an object says anything of a record that is inlined in it, and all that it cannot be without."""
    keys = {marks[Written].key or field.name: marks[Written] for field, _, marks in marked(record) if Written in marks}
    said = {key for key in keys if found.get(key) is not None}
    return bool(said) and all(key in said for key, written in keys.items() if written.needed)


def _by_format(field: Field[Any], value: Any, written: Written | None, found: Mapping[str, Any]) -> dict[str, Any]:
    """{format: value} of those that have one."""
    tables = {name: table for name, table in found.items() if isinstance(table, Mapping) and name not in _OBJECTS}
    if not is_record(value):
        assert written is not None
        key = written.key or field.name
        return {name: _value(value, table[key]) for name, table in tables.items() if table.get(key) is not None}
    shown = FORMS[written.form].shown if written is not None and written.form else value
    held = {name: table for name, table in tables.items() if _any_of(shown, table)}
    if written is not None and written.form:
        return {name: _formed(written.form, table) for name, table in held.items()}
    return {name: _record(value, table) for name, table in held.items()}


_OBJECTS = ("range", "under_plan")
"""Objects of a node that are no format."""


def _formed(form: str, found: Any) -> Any:
    shown, back = FORMS[form].shown, FORMS[form].back
    return back(_record(shown, found) if is_record(shown) else found)


def _value(type_: Any, found: Any) -> Any:
    """A value of this type; null is what is not finite where a number cannot be absent."""
    bare = inner(type_)
    if found is None:
        return math.inf if bare is float and not nullable(type_) else None
    if is_record(bare):
        return _record(bare, found, {"name": ""} if bare is Plan else {})
    origin, arguments = get_origin(bare), get_args(bare)
    if origin is tuple and arguments[-1] is not Ellipsis:
        return tuple(_value(argument, item) for argument, item in zip(arguments, found, strict=True))
    if origin is tuple:
        return tuple(_value(arguments[0], item) for item in found)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        spelt = arguments[0] if arguments[0] in (int, float) else str
        return {spelt(key): _value(arguments[1], item) for key, item in found.items()}
    return float(found) if bare is float else found


def _default(field: Field[Any], type_: Any) -> Any:
    """What stands where the files say nothing."""
    if field.default is not MISSING:
        return field.default
    if field.default_factory is not MISSING:
        return field.default_factory()
    bare = inner(type_)
    kind = get_origin(bare) or bare
    if nullable(type_) or kind is Any:
        return None
    if isinstance(kind, type) and issubclass(kind, Mapping):
        return {}
    return {str: "", tuple: (), bool: False, int: 0, float: math.nan}.get(kind)
