"""Lines of plain text that fit a terminal, whatever the names in them hold."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from typing import NamedTuple

from rich.cells import cell_len, chop_cells, set_cell_size

from .words import printable

COLORS = {"bold": "1", "muted": "2", "error": "31", "warning": "33", "info": "36", "good": "32"}
WIDEST = 110
"""Cells beyond which lines are harder to read, however wide the terminal is."""


class Look(NamedTuple):
    """Cells in a line, and whether they may be coloured."""

    width: int
    color: bool


def looks() -> Look:
    """Width and colour for this stdout: plain and 80 cells wide where nobody watches.

    FORCE_COLOR and NO_COLOR, set to anything but nothing, decide before what stdout is.
    """
    width = min(shutil.get_terminal_size().columns, WIDEST) if sys.stdout.isatty() else 80
    return Look(width, _wants_color())


def _wants_color() -> bool:
    if os.environ.get("NO_COLOR"):
        return False
    return bool(os.environ.get("FORCE_COLOR")) or (sys.stdout.isatty() and os.environ.get("TERM") != "dumb")


class Page:
    """Lines that fit. Everything is made printable here, so that no name can drive the terminal."""

    def __init__(self, width: int, color: bool) -> None:
        self.width = width
        self.lines: list[str] = []
        self._color = color

    def line(self, text: str = "", style: str = "") -> None:
        self.lines.append(self._styled(shorten(printable(text), self.width).rstrip(), style))

    def labelled(self, label: str, text: str, style: str = "") -> None:
        """A label in a column of its own, the text wrapped beside it."""
        room = self.width - 10
        for i, part in enumerate(_wrapped(printable(text), room)):
            head = f"{label if i == 0 else '':<10}"
            self.lines.append(self._styled(head, "bold" if i == 0 else "") + self._styled(part, style))

    def paragraph(self, text: str, indent: int, most: int, style: str = "") -> None:
        """Wrapped text, indented, ending in an ellipsis where it takes more than `most` lines."""
        lines = list(_wrapped(printable(text), self.width - indent - 2))
        shown = lines[:most]
        if len(lines) > most:
            shown[-1] += " …"
        self.lines += [self._styled(" " * indent + line, style) for line in shown]

    def _styled(self, text: str, style: str) -> str:
        return f"\x1b[{COLORS[style]}m{text}\x1b[0m" if self._color and style and text.strip() else text


def shorten(text: str, width: int) -> str:
    """At most `width` cells, the middle left out: both ends of a module path say more than its middle."""
    if cell_len(text) <= width:
        return text
    keep = width - 1
    head = set_cell_size(text, keep // 2).rstrip()
    return head + "…" + _tail(text, width - 1 - cell_len(head))


def _tail(text: str, width: int) -> str:
    taken = ""
    for character in reversed(text):
        if cell_len(character + taken) > width:
            break
        taken = character + taken
    return taken


def _wrapped(text: str, width: int) -> Iterator[str]:
    line = ""
    for word in text.split():
        for piece in chop_cells(word, width) if cell_len(word) > width else [word]:
            if line and cell_len(line) + 1 + cell_len(piece) > width:
                yield line
                line = piece
            else:
                line = f"{line} {piece}".strip()
    yield line


def columns(cells: list[tuple[str, int]]) -> str:
    """Cells of fixed widths, two spaces apart; what is too long loses its middle."""
    return "  ".join(set_cell_size(shorten(printable(text), width), width) for text, width in cells)
