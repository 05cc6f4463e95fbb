"""How a record says which of its fields the files of an audit hold, under which key, and what they mean."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Written:
    """A field that the files hold: `Annotated[float, Written("meaning")]`.

    They are written, read, checked and described from it; a field without it stays out of them.

    meaning: what it is, and in which unit, as Markdown. measured: it stands in measurements.json, whole; else in
    plan.json, which people commit: what decides and what was decided. key: its name in the file, the field's own if left out. before:
    the key it stands before, where that is not the record's order. needed: who cannot do without it when a file is read,
    "plan" (applying a plan) or "audit" (comparing two); a file that lacks another field is read all the same. left_out:
    None is not written. sparse: nor is the record's default. choices: all the texts there are, of one or of each.
    least, most: bounds of a number. finite: a number that is never null. exact: a setting, kept to the last digit, where
    what is measured has seven. schema: what else its JSON schema says. form: the class of document/contents.py that stands
    in the file for the record.
    """

    meaning: str
    key: str = ""
    before: str = ""
    needed: str = ""
    left_out: bool = False
    sparse: bool = False
    measured: bool = False
    choices: tuple[str, ...] = ()
    least: float | None = None
    most: float | None = None
    finite: bool = False
    exact: bool = False
    schema: Mapping[str, Any] = field(default_factory=dict)
    form: str = ""


@dataclass(frozen=True)
class Inlined:
    """A field that holds a record whose own written fields stand in this one's place; each is null if it is None."""


@dataclass(frozen=True)
class ByFormat:
    """A field {number format: value}: the file has an object under the name of each format, made of all such fields.

    The formats are those of the record's first such field. left_out: what a format lacks here is not written; else it is
    null. A value that is no record is Written as well.
    """

    left_out: bool = False
