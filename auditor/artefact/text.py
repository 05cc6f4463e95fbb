"""Writes comments and literals of generated code. Importing this module does not import torch."""

from __future__ import annotations

import textwrap
from typing import Any

WIDTH = 100
"""Maximum number of characters of a comment line, and of an entry of a dict that takes one line."""


def comment(*paragraphs: str) -> str:
    """Format paragraphs as comment lines; a line break inside a paragraph cannot end the comment."""
    wrapper = textwrap.TextWrapper(WIDTH, "# ", "# ", break_long_words=False, break_on_hyphens=False)
    lines = list[str]()
    for paragraph in paragraphs:
        printable = "".join(c if c.isprintable() else " " for c in paragraph)
        lines += wrapper.wrap(printable)
    return "".join(f"{line}\n" for line in lines)


def literal(value: Any, indent: str = "") -> str:
    """A value as Python source: on one line if it fits and contains no dicts, otherwise one entry per line."""
    short = repr(value)
    if not value or not isinstance(value, (dict, list)):
        return short
    has_dicts = False
    if isinstance(value, dict):
        has_dicts = not indent or any(isinstance(item, dict) for item in value.values())
    if not has_dicts and len(indent) + len(short) <= WIDTH:
        return short
    inner = indent + "    "
    if isinstance(value, list):
        lines = [f"{inner}{item!r},\n" for item in value]
        return "[\n" + "".join(lines) + f"{indent}]"
    lines = [f"{inner}{key!r}: {literal(item, inner)},\n" for key, item in value.items()]
    return "{\n" + "".join(lines) + f"{indent}}}"
