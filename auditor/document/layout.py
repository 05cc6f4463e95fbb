"""JSON laid out to be read and compared by line: what fits stands on one."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

WIDTH = 120


def laid_out(value: Any) -> str:
    """An object or a list takes one line where that has at most WIDTH characters, else one for each of its items."""
    return "".join(_lines(value, 0)) + "\n"


def one_a_line(document: Mapping[str, Any]) -> str:
    """The entries of the top; what they hold takes a line an item, however long that is."""
    return "{\n" + ",\n".join(f" {json.dumps(key)}: {_items(value)}" for key, value in document.items()) + "\n}\n"


def _lines(value: Any, depth: int, before: int = 0) -> Iterator[str]:
    """before: how many characters of the line are taken."""
    short = json.dumps(value)
    if not isinstance(value, dict | list) or not value or before + depth + len(short) <= WIDTH:
        yield short
        return
    start, end = ("{", "}") if isinstance(value, dict) else ("[", "]")
    items = value.items() if isinstance(value, dict) else (("", item) for item in value)
    yield start
    for number, (key, item) in enumerate(items):
        name = f"{json.dumps(key)}: " if isinstance(value, dict) else ""
        yield f"{',' * (number > 0)}\n{' ' * (depth + 1)}{name}"
        yield from _lines(item, depth + 1, len(name))
    yield f"\n{' ' * depth}{end}"


def _items(value: Any) -> str:
    if not value or not isinstance(value, dict | list):
        return json.dumps(value)
    if isinstance(value, dict):
        return "{" + ",".join(f"\n  {json.dumps(key)}: {_close(item)}" for key, item in value.items()) + "\n }"
    return "[" + ",".join(f"\n  {_close(item)}" for item in value) + "\n ]"


def _close(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))
