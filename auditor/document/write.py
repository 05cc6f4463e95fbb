"""The files of an audit written: an Audit as plain data; the same audit gives the same bytes."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, get_args, get_origin

from ..records import Audit
from .contents import Document, Measurements, PlanFile
from .layout import laid_out, one_a_line
from .parts import ABSENT, MEASUREMENTS, PLAN, WHOLE, Part, inner, is_record, nullable, part_of

Encoder = Callable[[Any], Any]


def texts(audit: Audit) -> dict[str, str]:
    """plan.json and measurements.json, by their names."""
    plan, measured = _both(audit)
    return {PLAN: laid_out(plan), MEASUREMENTS: one_a_line(measured)}


def to_plan(audit: Audit) -> dict[str, Any]:
    """The contents of plan.json, strict JSON: numbers of seven significant digits, null for what is not finite."""
    return written(PlanFile.of(audit), PLAN)


def to_measurements(audit: Audit) -> dict[str, Any]:
    """The contents of measurements.json, in the same way."""
    return _both(audit)[1]


def to_document(audit: Audit) -> dict[str, Any]:
    """Everything in one document."""
    return written(Document.of(audit))


def _both(audit: Audit) -> tuple[dict[str, Any], dict[str, Any]]:
    odd: dict[str, list[str]] = {}
    plan = finite(_encoded(PlanFile.of(audit), PLAN), odd)
    measured = finite(_encoded(Measurements.of(audit, plan), MEASUREMENTS), odd)
    return plan, {**measured, "not_finite": odd}


def written(record: Any, file: str = WHOLE) -> dict[str, Any]:
    """What a file holds of a record."""
    found: dict[str, Any] = finite(_encoded(record, file), {})
    return found


def _encoded(record: Any, file: str) -> Any:
    kind: Any = type(record)
    return encoder(kind, file=file)(record)


def finite(value: Any, odd: dict[str, list[str]], pointer: str = "") -> Any:
    """The same data with null for what is not finite; odd: takes the JSON pointers (RFC 6901) to that, by what it is."""
    if isinstance(value, float) and not math.isfinite(value):
        odd.setdefault(str(value), []).append(pointer)
        return None
    if isinstance(value, dict):
        return {key: finite(item, odd, f"{pointer}/{pointed(key)}") for key, item in value.items()}
    if isinstance(value, list):
        return [finite(item, odd, f"{pointer}/{index}") for index, item in enumerate(value)]
    return value


def pointed(key: str) -> str:
    """A key as a step of a JSON pointer."""
    return key.replace("~", "~0").replace("/", "~1")


@functools.cache
def encoder(type_: Any, exact: bool = False, file: str = WHOLE) -> Encoder:
    """What makes plain data of a value of this type. exact: numbers keep all their digits."""
    encode = _encoder(inner(type_), exact, file)
    return (lambda value: None if value is None else encode(value)) if nullable(type_) else encode


def _encoder(type_: Any, exact: bool, file: str) -> Encoder:
    origin, arguments = get_origin(type_), get_args(type_)
    if is_record(type_):
        return _object(part_of(type_, file))
    if type_ is float:
        return functools.partial(number, exact=exact)
    if origin is tuple and arguments[-1] is not Ellipsis:
        each = [encoder(argument, exact, file) for argument in arguments]
        return lambda values: [encode(value) for encode, value in zip(each, values, strict=True)]
    if origin is tuple:
        one = encoder(arguments[0], exact, file)
        return lambda values: [one(value) for value in values]
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return _mapping(arguments[0], encoder(arguments[1], exact, file))
    return plain


def _object(part: Part) -> Encoder:
    fill, below = _filler(part), _filler(part.by_format) if part.by_format is not None else None

    def encode(record: Any) -> dict[str, Any]:
        made: dict[str, Any] = fill(record)
        if below is not None:
            made |= {name: below((record, name)) for name in part.formats(record)}
        return made

    return encode


def _filler(part: Part) -> Encoder:
    encoders = [(entry, encoder(entry.type, entry.written.exact, entry.file)) for entry in part.entries]

    def fill(record: Any) -> dict[str, Any]:
        values = ((entry.key, encode, entry.value(record)) for entry, encode in encoders)
        return {key: None if value is None else encode(value) for key, encode, value in values if value is not ABSENT}

    return fill


def _mapping(key: Any, encode: Encoder) -> Encoder:
    if key is int:
        return lambda found: {str(name): encode(value) for name, value in sorted(found.items())}
    spelt = (lambda name: f"{name:g}") if key is float else str
    return lambda found: {spelt(name): encode(value) for name, value in found.items()}


def number(value: float | None, exact: bool = False) -> float | None:
    """A number to seven significant digits: what is beyond them varies with the order of a reduction."""
    return value if exact or value is None or not math.isfinite(value) else float(f"{value:.7g}")


def plain(value: Any) -> Any:
    """Whatever a rule's evidence holds, as data that JSON has."""
    if isinstance(value, float):
        return number(value)
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    return value if value is None or isinstance(value, (bool, int, str)) else str(value)
