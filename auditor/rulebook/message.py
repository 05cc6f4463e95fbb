"""The message of a rule: a template whose fields are facts, and whose clauses may speak of one format alone."""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Collection
from typing import Any

from ..numerics.formats import label

FORMATS = "formats"
"""A field of its own: the formats that a finding speaks of."""

_CLAUSE = re.compile(r"\[(\w+): ([^]]*)\](; )?")


def facts_shown(message: str) -> list[str]:
    """Addresses of the facts that a message shows, in the order written. Raises: ValueError for what is no template."""
    return [name for _, name, _, _ in string.Formatter().parse(message) if name is not None]


def clauses(message: str) -> list[str]:
    """The formats that a message has clauses of their own for, `[bf16: in BF16 it raises]`."""
    return [found[1] for found in _CLAUSE.finditer(message)]


def filled(message: str, value: Callable[[str], Any], formats: Collection[str]) -> str:
    """The message with `value(address)` in the place of each fact; one that is not known reads "unknown".

    formats: those it speaks of. A clause about another is left out, and `{formats}` names them.
    """
    kept = _CLAUSE.sub(lambda found: f"{found[2]}{found[3] or ''}" if found[1] in formats else "", message)
    named = " and ".join(label(name) for name in formats)
    return _Filler(lambda name: named if name == FORMATS else value(name)).vformat(kept.removesuffix("; "), (), {})


class ByFormat(dict[str, Any]):
    """A fact that is kept by format, all of it: `0.5 in FP16 and 4 in BF16`."""

    def __format__(self, spec: str) -> str:
        return " and ".join(f"{_shown(value, spec)} in {label(name)}" for name, value in self.items())


def _shown(value: Any, spec: str) -> str:
    return "unknown" if value is None else format(value, spec)


def about(text: str, formats: Collection[str], others: Collection[str]) -> str:
    """The sentences of a text that name none of `others` beside the formats."""
    if all(name in formats for name in others):
        return text
    labels = [re.compile(rf"\b{re.escape(label(name))}\b") for name in others if name not in formats]
    sentences = re.split(r"(?<=\.)\s+", text)
    return " ".join(line for line in sentences if not any(name.search(line) for name in labels))


class _Filler(string.Formatter):
    """str.format in which a field is the address of a fact, dots included."""

    def __init__(self, value: Callable[[str], Any]) -> None:
        self._value = value

    def get_field(self, field_name: str, args: Any, kwargs: Any) -> tuple[Any, str]:
        return self._value(field_name), field_name

    def format_field(self, value: Any, format_spec: str) -> str:
        if re.search(r"\d{3}", format_spec):
            raise ValueError(f"{format_spec!r} asks for a hundred characters or more")
        return _shown(value, format_spec)
