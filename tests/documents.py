"""Random records of everything that plan.json holds, and documents with one thing changed."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from hypothesis import strategies as st

from auditor.document.parts import inner, nullable
from auditor.records import Magnitudes
from auditor.records.written import ByFormat, Written

Place = tuple[str | int, ...]
TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=8)
FORMATS = ("fp16", "bf16", "e6m9")
UNBOUNDED = Written("")


MAGNITUDES = st.builds(
    Magnitudes,
    max_abs=st.floats(0, 1e38),
    min_abs=st.floats(0, 1e38),
    zeros=st.integers(0, 99),
    exponents=st.dictionaries(st.integers(-127, 127), st.integers(1, 99), max_size=2),
    nonfinite=st.integers(0, 99),
    norm=st.floats(0, 1e38),
    rounding=st.dictionaries(st.sampled_from(FORMATS), st.floats(0, 1), max_size=2),
)


@functools.cache
def records(record: type) -> st.SearchStrategy[Any]:
    """Records of this type, drawn within the bounds that the fields state; what the file does not hold has its default."""
    if record is Magnitudes:
        return MAGNITUDES
    hints = get_type_hints(record, include_extras=True)
    needed = [field for field in fields(record) if get_origin(hints[field.name]) is Annotated or _required(field)]
    return st.builds(record, **{field.name: _drawn(hints[field.name]) for field in needed})


def _required(field: Field[Any]) -> bool:
    return field.default is MISSING and field.default_factory is MISSING


def _drawn(hint: Any) -> st.SearchStrategy[Any]:
    if get_origin(hint) is Annotated:
        marks = {type(mark): mark for mark in hint.__metadata__}
        if ByFormat in marks:
            value = get_args(get_args(hint)[0])[1]
            return st.fixed_dictionaries({name: _of(value, marks.get(Written, UNBOUNDED)) for name in FORMATS[:2]})
        return _of(get_args(hint)[0], marks.get(Written, UNBOUNDED))
    return _of(hint, UNBOUNDED)


def _of(type_: Any, written: Written) -> st.SearchStrategy[Any]:
    bare = inner(type_)
    drawn = _bare(bare, written)
    return st.none() | drawn if nullable(type_) else drawn


def _bare(type_: Any, written: Written) -> st.SearchStrategy[Any]:
    origin, arguments = get_origin(type_), get_args(type_)
    if is_dataclass(type_):
        return records(type_)
    if origin is tuple and arguments[-1] is not Ellipsis:
        return st.tuples(*(_of(argument, written) for argument in arguments))
    if origin is tuple:
        least_many = written.schema.get("minItems", 0)
        return st.lists(_of(arguments[0], written), min_size=least_many, max_size=least_many + 2).map(tuple)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        value = _of(arguments[1], written)
        always = st.fixed_dictionaries(dict.fromkeys(written.schema.get("required", ()), value))
        more = st.dictionaries(_of(arguments[0], UNBOUNDED), value, max_size=2)
        return st.builds(lambda first, second: {**first, **second}, always, more)
    least, most = written.least, written.most
    if type_ is float:
        limits = {"min_value": least, "max_value": most}
        return st.floats(**limits, allow_nan=False, allow_infinity=not written.finite and None in (least, most))
    if type_ is int:
        return st.integers(-(2**40) if least is None else int(least), 2**40)
    if type_ is str:
        return st.sampled_from(written.choices) if written.choices else TEXT
    if type_ is bool:
        return st.booleans()
    assert type_ is Any, f"nothing is drawn for {type_}"
    return st.none() | st.integers() | TEXT


def places(value: Any, at: Place = ()) -> Iterator[Place]:
    """Every place in a document below the top."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inside in items:
        yield (*at, key)
        yield from places(inside, (*at, key))


def without(document: Any, place: Place) -> Any:
    """A copy that lacks one place."""
    changed = copy.deepcopy(document)
    del _holder(changed, place)[place[-1]]
    return changed


def replaced(document: Any, place: Place, value: Any) -> Any:
    """A copy with another value in one place."""
    changed = copy.deepcopy(document)
    _holder(changed, place)[place[-1]] = value
    return changed


def at(document: Any, place: Place) -> Any:
    """What lies in a place."""
    for key in place:
        document = document[key]
    return document


def _holder(document: Any, place: Place) -> Any:
    return at(document, place[:-1])
