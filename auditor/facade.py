"""Public functions return records as objects that users hold: with the same fields, and methods that show and save them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from functools import wraps
from typing import Any, ParamSpec, Protocol, TypeVar

Given = ParamSpec("Given")
Shown = TypeVar("Shown", bound="MadeOfRecord")


class MadeOfRecord(Protocol):
    """A class of objects with the contents of a record."""

    @classmethod
    def of(cls: type[Shown], record: Any, /) -> Shown:
        """The object with the contents of a record."""


def returning(function: Callable[Given, Any], shown: type[Shown]) -> Callable[Given, Shown]:
    """The function, with the same arguments, returning its record as an object of the class `shown`."""

    @wraps(function)
    def call(*args: Given.args, **options: Given.kwargs) -> Shown:
        return shown.of(function(*args, **options))

    return call


def contents(record: Any) -> dict[str, Any]:
    """{field: its value} of a record."""
    return {field.name: getattr(record, field.name) for field in fields(record)}
