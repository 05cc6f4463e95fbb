"""Reads the files of an audit and validates them before use; chooses the directory of a new audit."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ..artefact.strategies import STRATEGIES
from ..capture.places import portable_path
from ..errors import PlanError
from ..numerics.formats import FORMATS, label, runs
from ..records import Subject
from ..records.audit import FORMAT_VERSION, Audit
from ..records.folder import check_directory, path_of
from ..records.plan import Plan
from .codec import MEASUREMENTS, PLAN, adapter, digest, merge

Place = Sequence[str | int]
"""Path in a document: keys and indices from its root."""

AGAIN = "Audit the model again to write a new plan.json, or undo the changes in this one"
ALONE = (
    "Only plan.json was read: the measurements.json with operations, weights and regions is "
    "missing, or belongs to another plan.json."
)
PROGRAMS = (".pt2", ".onnx")
SHOULD_BE = {
    "string_type": "text",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "int_parsing": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "bool_type": "true or false",
    "tuple_type": "a list",
    "dict_type": "an object",
    "dataclass_type": "an object",
    "too_long": "a list of {max_length}",
}
"""{pydantic's error type: words for the expected value}, used in error messages."""


def load(directory: str | PathLike[str]) -> Audit:
    """Load an audit from its directory or its plan.json.

    The audit lacks model, inputs and tensors; its numbers are rounded as in the files. Without the matching
    measurements.json the audit has no operations, and a warning says so. Raises: PlanError(slug="missing-plan" |
    "bad-plan").
    """
    file = _plan_in(path_of(directory, "the directory of an audit"))
    document = read_json(file)
    beside = None  # the measurements.json written with this plan.json
    with suppress(OSError, ValueError, RecursionError):
        given = json.loads((file.parent / MEASUREMENTS).read_text(encoding="utf-8"))
        beside = given if isinstance(given, Mapping) and given.get("plan") == digest(document) else None
    audit = audit_of(merge(document, beside), str(file))
    _check_names_of_plans(audit, str(file))
    return audit if beside else replace(audit, warnings=(*audit.warnings, ALONE))


def load_plan(path: str | PathLike[str]) -> dict[str, Any]:
    """The validated contents of a `plan.json`. path: the file, or the directory of its audit.

    Raises: PlanError(slug="missing-plan" | "bad-plan").
    """
    file = path_of(path, "a plan.json or its directory")
    document = read_json(file)
    applicable(document, str(file))
    return dict(document)


def read_json(path: Path) -> Any:
    """Read a plan.json. path: the file, or its directory. Raises: PlanError(slug="missing-plan" | "bad-plan")."""
    file = _plan_in(path)
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        reason = error.strerror or str(error)
        raise PlanError(
            f"{file} cannot be read ({reason}). Give the path of a plan.json, or of the directory that contains one.",
            slug="missing-plan",
        ) from error
    except (ValueError, RecursionError) as error:
        raise PlanError(f"{file} is not a plan: {error}. {AGAIN}.", slug="bad-plan") from error


def audit_of(document: Any, where: str) -> Audit:
    """Build an Audit from the contents of plan.json, merged with measurements.json if available. where: for messages.

    Raises: PlanError(slug="bad-plan"), with the JSON path of the error.
    """
    version = document.get("format_version") if isinstance(document, Mapping) else FORMAT_VERSION
    if version != FORMAT_VERSION or isinstance(version, bool):
        raise _wrong(where, ("format_version",), str(FORMAT_VERSION), version)
    audit: Audit = _read(Audit, document, where)
    for name, plan in audit.plans.items():
        if "" not in plan.scopes:
            place = json_path(("plans", name, "scopes", ""))
            raise PlanError(f"{where}: `{place}` is missing. {AGAIN}.", slug="bad-plan")
        if plan.name != name:
            raise _wrong(where, ("plans", name, "name"), json.dumps(name), plan.name)
    if audit.recommended not in (None, *audit.plans):
        raise _wrong(where, ("recommended",), f"one of {', '.join(audit.plans)}", audit.recommended)
    return audit


def applicable(document: Any, where: str) -> Audit:
    """Like `audit_of`, but the audit must have a plan, and the strategies and formats of its plans must exist. Raises:
    PlanError(slug="bad-plan")."""
    result = audit_of(document, where)
    if not result.plans:
        raise _wrong(where, ("plans",), "an object with a plan", {})
    _check_names_of_plans(result, where)
    return result


def audit_in(plan: Any) -> Audit:
    """The Audit that contains the plans, given as an Audit, a dict as in plan.json, or its path. Raises: PlanError."""
    if isinstance(plan, Audit):
        return plan
    if isinstance(plan, str | PathLike):
        return applicable(read_json(Path(plan)), str(plan))
    if isinstance(plan, Mapping) and "plans" in plan:
        return applicable(plan, "the plan")
    wanted = "pass an Audit, a dict as in plan.json, or the path of the file"
    raise PlanError(f"A plan cannot be read from a value of type {type(plan).__name__}: {wanted}.", slug="bad-plan")


def plan_called(plans: Mapping[str, Plan], name: object, others: Iterable[str] = ()) -> Plan:
    """The plan called `name`. Raises: PlanError, which lists the plans that can be applied, and `others`."""
    if isinstance(name, str) and name in plans:
        return plans[name]
    wanted = f"{name!r} is not among the plans" if name else "no plan is recommended"
    if running := sorted(key for key, plan in plans.items() if runs(plan.format)):
        raise PlanError(f"{wanted}; choose one of {', '.join([*running, *others])}.", slug="no-such-plan")
    lacking = " and ".join(dict.fromkeys(label(plan.format) for plan in plans.values()))
    raise PlanError(
        f"{wanted}, and none can be run: torch cannot compute in {lacking}. Audit a format in which torch computes.",
        slug="no-arithmetic",
    )


def plan_of(plan: Mapping[str, Any], where: str) -> Plan:
    """Build a Plan from a dict with at least strategy, format and scopes. Raises: PlanError(slug="bad-plan")."""
    result: Plan = _read(Plan, {"name": "", **plan}, where)
    _check_names(result, where, ())
    return result


def programs_in(directory: Path) -> tuple[str, ...]:
    """Exported programs that the plan.json in a directory names; none if the file cannot be read."""
    try:
        plans = audit_of(read_json(directory), "").plans.values()
    except PlanError:
        return ()
    programs = [plan.program for plan in plans if plan.program]
    named = [file.file for program in programs for file in (program, program.onnx) if file]
    return tuple(name for name in named if Path(name).name == name and name.endswith(PROGRAMS))


def json_path(place: Place) -> str:
    """A location in a document as JSONPath: `$.plans.cast_fp16.scopes["blocks.0"].precision`; long names are cut."""
    path = "$"
    for step in place:
        if step == "[key]":
            continue
        if isinstance(step, int):
            path += f"[{step}]"
            continue
        name = f"{step[:77]}..." if len(step) > 80 else step
        path += f".{name}" if name.isidentifier() else f"[{json.dumps(name)}]"
    return path


def _plan_in(path: Path) -> Path:
    return path / PLAN if path.is_dir() else path


def _check_names_of_plans(audit: Audit, where: str) -> None:
    """Raises: PlanError(slug="bad-plan") if a strategy or format of a plan does not exist."""
    for name, plan in audit.plans.items():
        _check_names(plan, where, ("plans", name))


def _check_names(plan: Plan, where: str, place: Place) -> None:
    """Raises: PlanError(slug="bad-plan") if the plan's strategy, its format or a precision of its scopes does not exist."""
    low = tuple(name for name, row in FORMATS.items() if row.low)
    _check_name(plan.strategy, STRATEGIES, where, (*place, "strategy"))
    _check_name(plan.format, low, where, (*place, "format"))
    for path, choice in plan.scopes.items():
        _check_name(choice.precision, ("fp32", *low), where, (*place, "scopes", path, "precision"))


def _check_name(name: str, known: tuple[str, ...], where: str, place: Place) -> None:
    if name not in known:
        raise _wrong(where, place, "one of " + ", ".join(known), name)


def _read(record: type, document: Any, where: str) -> Any:
    try:
        return adapter(record).validate_json(json.dumps(document), strict=True)
    except ValidationError as error:
        raise _explain(error.errors(include_url=False), where) from error
    except (TypeError, ValueError, RecursionError) as error:
        raise PlanError(f"{where} is not a plan: {error}. {AGAIN}.", slug="bad-plan") from error


def _explain(errors: Sequence[Mapping[str, Any]], where: str) -> PlanError:
    """A PlanError with one line on the first error that pydantic reports."""
    first, more = errors[0], f" ({len(errors) - 1} more like it)" if len(errors) > 1 else ""
    if first["type"] == "json_invalid":
        return PlanError(f"{where} is not a plan: {first['ctx']['error']}. {AGAIN}.", slug="bad-plan")
    if first["type"] == "missing":
        return PlanError(f"{where}: `{json_path(first['loc'])}` is missing{more}. {AGAIN}.", slug="bad-plan")
    should = SHOULD_BE.get(first["type"], first["msg"].removeprefix("Input should be "))
    return _wrong(where, first["loc"], should.format(**first.get("ctx", {})), first["input"], more)


def _wrong(where: str, place: Place, expected: str, value: Any, more: str = "") -> PlanError:
    """A PlanError with the location in the document, the expected value, the actual one, and what to do."""
    text = json.dumps(value, default=repr)
    short = text if len(text) <= 40 else f"{text[:37]}..."
    if value and isinstance(value, dict | list):
        short = "an object" if isinstance(value, dict) else "a list"
    return PlanError(f"{where}: `{json_path(place)}` should be {expected}, is {short}{more}. {AGAIN}.", slug="bad-plan")


def default_directory(subject: Subject, *, writes: bool = True) -> Path:
    """The output directory for a model if the user names none: `audits/NAME`.

    If that folder has the audit of another file's model, names of parent folders of the model's file precede NAME.
    writes: whether files will be written there. Raises: AuditorError(slug="bad-output") if that is impossible.
    """
    name = subject.name
    file = subject.origin.path if subject.origin else None
    parents = list(Path(file).parts[-2:0:-1]) if file else []
    while True:
        safe = "".join(c if c.isalnum() or c in "._-" else "_" for c in name).lstrip(".")
        directory = Path("audits") / (safe or "model")
        audited = None
        with suppress(OSError, ValueError, LookupError, TypeError):
            audited = json.loads((directory / "plan.json").read_text(encoding="utf-8"))["subject"]["file"]
        is_of_other_file = file and audited and str(audited) != portable_path(file)
        if not is_of_other_file or not parents:
            if writes:
                check_directory(directory)
            return directory
        name = f"{parents.pop(0)}-{name}"
