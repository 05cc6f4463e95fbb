"""Plans as whole plan.json documents, random records of everything that the files hold, and documents with one thing changed."""

import copy
import functools
import json
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from hypothesis import strategies as st

from auditor.document.codec import to_plan
from auditor.records.written import FileField
from tests.unit.report.factory import make_audit

Place = tuple[str | int, ...]
TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=8)
UNBOUNDED = FileField("")


def document(plans: Mapping[str, Mapping[str, Any]], recommended: str | None = None, **changes: Any) -> dict[str, Any]:
    """A whole plan.json with these plans, of which strategy, format and scopes are enough; changes: of other keys."""
    found: dict[str, Any] = json.loads(json.dumps(to_plan(make_audit(4))))
    named = {name: {"name": name, **plan} for name, plan in plans.items()}
    return {**found, "structure": "", "plans": named, "recommended": recommended, **changes}


@functools.cache
def records(record: type) -> st.SearchStrategy[Any]:
    """Records of this type, drawn within the bounds that the fields state; what the file does not hold has its default."""
    hints = get_type_hints(record, include_extras=True)
    needed = [field for field in fields(record) if written(hints[field.name]) is not None or _required(field)]
    return st.builds(record, **{field.name: _of(hints[field.name], UNBOUNDED) for field in needed})


def written(hint: Any) -> FileField | None:
    """What a field says of itself."""
    marks = hint.__metadata__ if get_origin(hint) is Annotated else ()
    return next((mark for mark in marks if isinstance(mark, FileField)), None)


def _required(field: Field[Any]) -> bool:
    return field.default is MISSING and field.default_factory is MISSING


def _of(type_: Any, mark: FileField) -> st.SearchStrategy[Any]:
    if get_origin(type_) is Annotated:
        return _of(get_args(type_)[0], written(type_) or mark)
    if get_origin(type_) in (Union, UnionType):
        return st.one_of([_of(option, mark) for option in get_args(type_)])
    return _bare(type_, mark)


def _bare(type_: Any, mark: FileField) -> st.SearchStrategy[Any]:
    origin, arguments = get_origin(type_), get_args(type_)
    if is_dataclass(type_):
        return records(type_)
    if origin is tuple and arguments[-1] is not Ellipsis:
        return st.tuples(*(_of(argument, mark) for argument in arguments))
    if origin is tuple:
        return st.lists(_of(arguments[0], mark), max_size=2).map(tuple)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        keys = {int: st.integers(-150, 150), float: st.floats(1e-6, 1e6).map(lambda x: float(f"{x:.7g}")), str: TEXT}
        return st.dictionaries(keys[arguments[0]], _of(arguments[1], mark), max_size=2)
    least, most = mark.least, mark.most
    if type_ is float:
        return st.floats(least, most, allow_nan=False, allow_infinity=None in (least, most))
    if type_ is int:
        return st.integers(-(2**40) if least is None else int(least), 2**40)
    if type_ is str:
        return st.sampled_from(mark.choices) if mark.choices else TEXT
    if type_ is bool:
        return st.booleans()
    if type_ is NoneType:
        return st.none()
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
    del at(changed, place[:-1])[place[-1]]
    return changed


def replaced(document: Any, place: Place, value: Any) -> Any:
    """A copy with another value in one place."""
    changed = copy.deepcopy(document)
    at(changed, place[:-1])[place[-1]] = value
    return changed


def at(document: Any, place: Place) -> Any:
    """What lies in a place."""
    for key in place:
        document = document[key]
    return document
