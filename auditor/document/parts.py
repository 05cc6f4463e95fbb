"""The objects of the files, read off the records: which entries each has, of which type, and where their values are."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass, replace
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from ..records.written import ByFormat, Inlined, Written
from .contents import FORMS

ABSENT = object()
"""The value of an entry that is left out."""

PLAN, MEASUREMENTS, WHOLE = "plan.json", "measurements.json", "both"
"""Which file an object is seen for: each holds its share of the entries, and one document may hold them all."""


@dataclass(frozen=True)
class Entry:
    """One key of an object. type: of the record's field. value: takes the record, for what is kept by format the pair
    (record, format). optional: it may be left out. default: the record's, for those who read a file without it.
    file: which share of the objects below it stands here.
    """

    key: str
    type: Any
    written: Written
    value: Callable[[Any], Any]
    optional: bool = False
    default: Any = None
    file: str = WHOLE


@dataclass(frozen=True)
class Part:
    """An object. by_format: what further keys, the names of formats, hold; formats: their names in a record."""

    name: str
    entries: tuple[Entry, ...]
    by_format: Part | None = None
    formats: Callable[[Any], Iterable[str]] = lambda record: ()


@functools.cache
def part_of(record: Any, file: str = WHOLE) -> Part:
    """The object that a file holds for a record type.

    Inlined fields that are None are null each. Raises: ValueError where it would have a key twice.
    """
    plain: list[Entry] = []
    by_format: list[Entry] = []
    tables: list[str] = []
    for field, type_, marks in marked(record):
        grouped, written = marks.get(ByFormat), marks.get(Written)
        if grouped is not None:
            tables.append(field.name)
            by_format += _columns(field, type_, written, grouped.left_out)
        elif Inlined in marks:
            within = part_of(inner(type_), file).entries
            read = _reader(field.name)
            plain += [_below(entry, _then(read, entry.value), nullable(type_)) for entry in within]
        elif written is not None and (share := _share(type_, written, file)):
            plain.append(replace(_entry(field, type_, written, _reader(field.name)), file=share))
    shared = file == MEASUREMENTS and any(m[Written].measured is False for _, _, m in marked(record) if Written in m)
    name = f"Measured{record.__name__}" if shared else record.__name__
    below = Part(f"{name} by format", _ordered(by_format)) if tables else None
    return Part(name, _ordered(plain), below, _reader(tables[0]) if tables else Part.formats)


def records_in(type_: Any) -> Iterator[Any]:
    """The types of the records that values of this type hold, at the top of them."""
    bare = inner(type_)
    if is_record(bare):
        yield bare
    for argument in get_args(bare):
        yield from records_in(argument)


def _share(type_: Any, written: Written, file: str) -> str | None:
    """Which share of the objects in a field a file holds; None where the field is not in it."""
    if file == WHOLE or (file == MEASUREMENTS and written.measured):
        return WHOLE
    if file == PLAN:
        return None if written.measured else PLAN
    shown = FORMS[written.form].shown if written.form else type_
    return MEASUREMENTS if any(part_of(record, file).entries for record in records_in(shown)) else None


def is_record(type_: Any) -> bool:
    """Whether values of this type are objects of the file."""
    return is_dataclass(type_)


def inner(type_: Any) -> Any:
    """A type without its None."""
    if get_origin(type_) in (Union, UnionType):
        kept = [option for option in get_args(type_) if option is not NoneType]
        return kept[0] if len(kept) == 1 else Any
    return type_


def nullable(type_: Any) -> bool:
    """Whether a type has a None."""
    return get_origin(type_) in (Union, UnionType) and NoneType in get_args(type_)


def marked(record: type) -> Iterable[tuple[Field[Any], Any, dict[type, Any]]]:
    """(field, type, marks) of the fields that the file holds, in the record's order."""
    hints = get_type_hints(record, include_extras=True)
    for field in fields(record):
        hint = hints[field.name]
        if get_origin(hint) is Annotated:
            marks = {type(mark): mark for mark in hint.__metadata__}
            if marks.keys() & {Written, Inlined, ByFormat}:
                yield field, get_args(hint)[0], marks


def _columns(field: Field[Any], type_: Any, written: Written | None, left_out: bool) -> Iterable[Entry]:
    """What a field {format: value} puts in the object of each format."""
    name, value = field.name, get_args(type_)[1]
    form = FORMS[written.form] if written is not None and written.form else None
    value, made = (form.shown, form.of) if form else (value, _same)
    if not is_record(value):
        assert written is not None
        return [_entry(field, value | None, written, lambda at: getattr(at[0], name).get(at[1]))]
    missing = ABSENT if left_out else None

    def column(entry: Entry) -> Entry:
        def read(at: tuple[Any, str]) -> Any:
            table = getattr(at[0], name)
            return entry.value(made(table[at[1]])) if at[1] in table else missing

        return replace(_below(entry, read, not left_out), optional=entry.optional or left_out)

    return [column(entry) for entry in part_of(value).entries]


def _below(entry: Entry, read: Callable[[Any], Any], may_be_null: bool) -> Entry:
    """An entry of a record that stands in another's place; read: its value from there, null where the record is None."""
    return replace(entry, type=_or_none(entry.type) if may_be_null else entry.type, value=read)


def _or_none(type_: Any) -> Any:
    return type_ if nullable(type_) else type_ | None


def _entry(field: Field[Any], type_: Any, written: Written, read: Callable[[Any], Any]) -> Entry:
    if written.form:
        form = FORMS[written.form]
        type_, read = _or_none(form.shown) if nullable(type_) else form.shown, _then(read, form.of)
    default = field.default if field.default_factory is MISSING else field.default_factory()
    return Entry(
        written.key or field.name,
        type_,
        written,
        _unless(read, None if written.left_out else default) if written.left_out or written.sparse else read,
        written.left_out or written.sparse,
        None if default is MISSING else default,
    )


def _then(read: Callable[[Any], Any], made: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def both(record: Any) -> Any:
        found = read(record)
        return None if found is None else made(found)

    return both


def _unless(read: Callable[[Any], Any], usual: Any) -> Callable[[Any], Any]:
    """What is read, but for the usual value, which is left out."""

    def other(record: Any) -> Any:
        found = read(record)
        return ABSENT if found == usual else found

    return other


def _same(value: Any) -> Any:
    return value


def _reader(name: str) -> Callable[[Any], Any]:
    return lambda record: getattr(record, name)


def _ordered(entries: list[Entry]) -> tuple[Entry, ...]:
    """In the order of the file. A key to stand before may be that of a record that this one is inlined in.

    Raises: ValueError where two have one key.
    """
    keys = [entry.key for entry in entries]
    twice = sorted({key for key in keys if keys.count(key) > 1})
    if twice:
        raise ValueError(f"a file would hold {', '.join(twice)} twice in one object: give one of them another key")
    placed = list(entries)
    for entry in entries:
        if entry.written.before in keys:
            placed.remove(entry)
            placed.insert([other.key for other in placed].index(entry.written.before), entry)
    return tuple(placed)
