"""The files of an audit read back: nothing in them is trusted before it has been looked at."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from ..artefact import strategies
from ..errors import PlanError
from ..folder import path_of
from ..numerics.formats import FORMATS, NAME
from ..records import FORMAT_VERSION, Plan
from .contents import Document, Measurements, PlanFile, digest
from .parts import MEASUREMENTS, PLAN, WHOLE

Place = Sequence[str | int]
"""Keys and indices from the top of a document on."""

AGAIN = "Audit the model again to write a new one, or undo what was changed in it"
SHOULD_BE = {
    "string_type": "text",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "literal_error": "{expected}",
    "string_pattern_mismatch": "a whole number",
    "too_short": "a list of {min_length}",
    "too_long": "a list of {max_length}",
}
"""{pydantic's name of an error: what should have been there}, filled in from what pydantic says of it."""


def load_plan(path: str | PathLike[str]) -> dict[str, Any]:
    """The contents of a `plan.json`, checked; path: of it, or of the directory that an audit wrote it into.

    Raises: PlanError(slug="missing-plan" | "bad-plan").
    """
    file = path_of(path, "a plan.json or its directory")
    document = loaded(file)
    read_document(document, str(file))
    return dict(document)


def plan_in(path: Path) -> Path:
    """The plan.json that is meant: the file itself, or the one in a directory."""
    return path / PLAN if path.is_dir() else path


def loaded(path: Path) -> Any:
    """What a plan.json holds, or the one in a directory. Raises: PlanError(slug="missing-plan" | "bad-plan")."""
    file = plan_in(path)
    try:
        return json.loads(file.read_text(encoding="utf-8"), parse_constant=lambda name: None)
    except OSError as error:
        reason = error.strerror or str(error)
        raise PlanError(
            f"{file} cannot be read ({reason}). Give the path of a plan.json, or of the directory that holds one.",
            slug="missing-plan",
        ) from error
    except (ValueError, RecursionError) as error:
        raise PlanError(f"{file} is not a plan: {error}. {AGAIN}.", slug="bad-plan") from error


def measured_beside(path: Path, document: Any) -> Any:
    """What the measurements.json beside a plan.json holds, if both were written together; None else.

    path: as `loaded` takes it. document: what that plan.json holds.
    """
    file = plan_in(path).parent / MEASUREMENTS
    try:
        found = json.loads(file.read_text(encoding="utf-8"), parse_constant=lambda name: None)
        return found if isinstance(found, Mapping) and found.get("plan") == digest(document) else None
    except (OSError, ValueError, RecursionError):
        return None


def read_document(document: Any, where: str) -> Any:
    """A document that plans are applied from, by attributes; what it lacks has the record's default, or is None.

    where: what it is, for the message. Raises: PlanError(slug="bad-plan"), with the path of what is wrong.
    """
    found = _document(document, where, "plan")
    for name, plan in found.plans.items():
        _check_names(plan, where, ("plans", name))
    return found


def read_audit(document: Any, where: str) -> Any:
    """A document that two audits are compared by, as `read_document` gives it; formats may be unknown here.

    Raises: PlanError(slug="bad-plan"), with the path of what is wrong or missing.
    """
    return _document(document, where, "audit")


def read_measurements(document: Any, where: str, plans: Any = None) -> Any:
    """What is in measurements.json, by attributes. plans: the document whose plans say which formats there are.

    Raises: PlanError(slug="bad-plan"), with the path of what is wrong.
    """
    _check_version(document, where)
    return _read(Measurements, document, where, "audit", MEASUREMENTS, plans)


def read_plan(plan: Any, where: str) -> Any:
    """One plan of a document, as `read_document` gives it. Raises: PlanError(slug="bad-plan")."""
    found = _read(Plan, plan, where, "plan")
    _check_names(found, where, ())
    return found


def read_all(document: Any, where: str) -> Any:
    """What both files hold, in one document. Raises: PlanError(slug="bad-plan"), with the path of what is wrong."""
    return _read(Document, document, where, "audit", WHOLE)


def _document(document: Any, where: str, reader: str) -> Any:
    _check_version(document, where)
    found = _read(PlanFile, document, where, reader)
    if not found.plans and reader == "plan":
        raise _wrong(where, ("plans",), "an object with a plan", {})
    return found


def _check_version(document: Any, where: str) -> None:
    version = document.get("format_version") if isinstance(document, Mapping) else FORMAT_VERSION
    if version != FORMAT_VERSION or isinstance(version, bool):
        raise _wrong(where, ("format_version",), str(FORMAT_VERSION), version)


def _check_names(plan: Any, where: str, place: Place) -> None:
    """Strategies and formats are those of this auditor. Raises: PlanError(slug="bad-plan").

    A format that another program registered is no reason to refuse the other plans of a file.
    """
    checks = [((*place, "strategy"), plan.strategy, strategies.known())]
    if plan.format in FORMATS or not NAME.fullmatch(plan.format):
        low = tuple(name for name, row in FORMATS.items() if row.low)
        checks.append(((*place, "format"), plan.format, low))
        for path, choice in plan.scopes.items():
            checks.append(((*place, "scopes", path, "precision"), choice.precision, ("fp32", *low)))
    for at, name, known in checks:
        if name not in known:
            raise _wrong(where, at, "one of " + ", ".join(known), name)


def _read(record: type, found: Any, where: str, reader: str, file: str = PLAN, plans: Any = None) -> Any:
    from pydantic import ValidationError

    from .models import model_of

    try:
        plain = _finite(found)
        return model_of(record, reader, file).model_validate(plain, context=_formats(plans or plain))
    except RecursionError as error:
        raise PlanError(f"{where} is not a plan: it is nested too deep. {AGAIN}.", slug="bad-plan") from error
    except ValidationError as error:
        raise _explained(error.errors(include_url=False), where) from error


def _finite(value: Any) -> Any:
    """The same with null for what is not finite: Python's JSON also has NaN and Infinity."""
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _formats(document: Any) -> frozenset[str]:
    """Formats that the plans of a document are in, as far as it can be read."""
    plans = document.get("plans") if isinstance(document, dict) else None
    named = [plan.get("format") for plan in plans.values() if isinstance(plan, dict)] if isinstance(plans, dict) else []
    return frozenset(name for name in named if isinstance(name, str))


def _wrong(where: str, place: Place, expected: str, found: Any, others: int = 0) -> PlanError:
    """One line: where, what should be there, what is, and what to do."""
    return PlanError(
        f"{where}: `{json_path(place)}` should be {expected}, is {_shown(found)}{_more(others)}. {AGAIN}.",
        slug="bad-plan",
    )


def _more(others: int) -> str:
    return f" ({others} more like it)" if others else ""


def _explained(errors: Sequence[Mapping[str, Any]], where: str) -> PlanError:
    """The first of what pydantic found."""
    first = errors[0]
    if first["type"] != "missing":
        return _wrong(where, first["loc"], _expected(first), first["input"], len(errors) - 1)
    return PlanError(
        f"{where}: `{json_path(first['loc'])}` is missing{_more(len(errors) - 1)}. {AGAIN}.", slug="bad-plan"
    )


def _expected(error: Mapping[str, Any]) -> str:
    if error["type"] in SHOULD_BE:
        return SHOULD_BE[error["type"]].format(**error.get("ctx", {}))
    return str(error["msg"]).removeprefix("Input should be ")


def json_path(place: Place) -> str:
    """A place in a document as JSONPath has it: `$.plans.cast_fp16.scopes["blocks.0"].precision`."""
    steps = (
        f"[{step}]" if isinstance(step, int) else f".{step}" if step.isidentifier() else f"[{json.dumps(step)}]"
        for step in place
        if step != "[key]"
    )
    return "$" + "".join(steps)


def _shown(value: Any) -> str:
    """A value in at most a few words."""
    if value and isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    text = json.dumps(value, default=repr)
    return text if len(text) <= 40 else text[:37] + "..."
