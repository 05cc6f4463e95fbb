"""The message of a rule: a template whose fields are facts."""

from __future__ import annotations

import re
import string
from collections.abc import Callable
from typing import Any


def facts_shown(message: str) -> list[str]:
    """Addresses of the facts that a message shows, in the order written. Raises: ValueError for what is no template."""
    return [name for _, name, _, _ in string.Formatter().parse(message) if name is not None]


def filled(message: str, value: Callable[[str], Any]) -> str:
    """The message with `value(address)` in the place of each fact; one that is not known reads "unknown"."""
    return _Filler(value).vformat(message, (), {})


class _Filler(string.Formatter):
    """str.format in which a field is the address of a fact, dots included."""

    def __init__(self, value: Callable[[str], Any]) -> None:
        self._value = value

    def get_field(self, field_name: str, args: Any, kwargs: Any) -> tuple[Any, str]:
        return self._value(field_name), field_name

    def format_field(self, value: Any, format_spec: str) -> str:
        if re.search(r"\d{3}", format_spec):
            raise ValueError(f"{format_spec!r} asks for a hundred characters or more")
        return "unknown" if value is None else str(super().format_field(value, format_spec))
