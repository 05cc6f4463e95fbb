"""Types by which files are checked and their JSON schemas made, built by pydantic from what the records say of them."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, model_validator

from .parts import WHOLE, Entry, Part, inner, is_record, nullable, part_of

READERS = {"plan": ("plan",), "audit": ("plan", "audit")}
"""{who reads a file: which fields it cannot do without, by `Written.needed`}."""

WRITER = "all"
"""The model of what is written: nothing is missing from it but what `Written` says may be."""

WHOLE_NUMBER = "^-?[0-9]{1,18}$"
"""A key that stands for a whole number."""

LARGEST = 2**64 - 1
"""The largest whole number in a file: what counts anything is far below, and arithmetic with it ends; a seed may be this."""


class _Open(BaseModel):
    """An object that may have keys which this version does not know."""

    model_config = ConfigDict(strict=True, extra="ignore", protected_namespaces=())


class _ByFormat(BaseModel):
    """An object whose further keys are names of formats; context: those that the file's plans are in.

    Keys of a later version are passed over: what is no object and no format of a plan.
    """

    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _known(cls, found: Any, info: ValidationInfo) -> Any:
        if not isinstance(found, Mapping):
            return found
        known = {*cls.model_fields, *(info.context or ())}
        return {key: value for key, value in found.items() if key in known or isinstance(value, Mapping)}

    def formats(self) -> dict[str, Any]:
        """What it holds by name of format."""
        return dict(self.model_extra or {})


@functools.cache
def model_of(record: Any, reader: str, file: str = WHOLE) -> type[BaseModel]:
    """The type of the object that a file has for a record. reader: one of READERS, or WRITER.

    What the reader can do without has the record's default where it is missing, or None.
    """
    return _model(part_of(record, file), reader)


def _model(part: Part, reader: str) -> type[BaseModel]:
    hints: dict[str, Any] = {}
    values: dict[str, Any] = {"__module__": __name__, "__qualname__": part.name}
    for entry in part.entries:
        hints[entry.key] = Annotated[_type(entry, reader), _field(entry)]
        if not _required(entry, reader):
            values[entry.key] = entry.default
    if part.by_format is not None:
        hints["__pydantic_extra__"] = dict[str, _model(part.by_format, reader)]  # type: ignore[misc]
    base = _Open if part.by_format is None else _ByFormat
    meta: Any = type(BaseModel)
    made: type[BaseModel] = meta(part.name, (base,), {**values, "__annotations__": hints})
    return made


def _required(entry: Entry, reader: str) -> bool:
    if reader == WRITER:
        return not entry.optional
    return entry.written.needed in READERS[reader]


def _field(entry: Entry) -> Any:
    """Its description, and what its JSON schema has beside."""
    extra = dict(entry.written.schema)
    if _keyed_by_numbers(inner(entry.type)):
        extra["additionalProperties"] = False
    return Field(description=entry.written.meaning, json_schema_extra=extra or None)


def _type(entry: Entry, reader: str) -> Any:
    found = _plain(inner(entry.type), entry, reader)
    return found | None if nullable(entry.type) and not entry.written.left_out else found


def _plain(type_: Any, entry: Entry, reader: str) -> Any:
    """The type of the plain data for values of `type_`."""
    origin, arguments = get_origin(type_), get_args(type_)
    if is_record(type_):
        return model_of(type_, reader, entry.file)
    if origin is tuple and arguments[-1] is not Ellipsis:
        each = _plain(inner(arguments[0]), entry, reader)
        return Annotated[list[each], Field(min_length=len(arguments), max_length=len(arguments))]  # type: ignore[valid-type]
    if origin is tuple:
        return list[_item(arguments[0], entry, reader)]  # type: ignore[misc]
    if isinstance(origin, type) and issubclass(origin, Mapping):
        key = Annotated[str, Field(pattern=WHOLE_NUMBER)] if arguments[0] is int else str
        return dict[key, _item(arguments[1], entry, reader)]  # type: ignore[misc, valid-type]
    written = entry.written
    if type_ is str and written.choices:
        return Literal[written.choices]
    if type_ in (int, float):
        most = LARGEST if type_ is int and written.most is None else written.most
        bounded = Annotated[type_, Field(ge=written.least, le=most)]
        return bounded if type_ is int or written.finite else bounded | None
    return type_


def _item(type_: Any, entry: Entry, reader: str) -> Any:
    found = _plain(inner(type_), entry, reader)
    return found | None if nullable(type_) else found


def _keyed_by_numbers(type_: Any) -> bool:
    origin = get_origin(type_)
    return isinstance(origin, type) and issubclass(origin, Mapping) and get_args(type_)[0] is int
