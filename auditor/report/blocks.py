"""A page as blocks, and the three ways to write one: for a terminal, as Markdown and as HTML."""

from __future__ import annotations

import io
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from markupsafe import Markup
from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table as Grid
from rich.text import Text

from .words import printable

STYLES = {"bold": "bold", "muted": "dim", "error": "red", "warning": "yellow", "info": "cyan", "good": "green"}
_PADDING = re.compile(r" +(?=(\x1b\[0m| )*$)")
LABEL = 10
"""Cells of the column that labels stand in."""
WIDEST = 110
"""Cells beyond which lines are harder to read, however wide the terminal is."""


@dataclass(frozen=True)
class Title:
    """What a page is about; `about` stands below it, smaller."""

    text: str
    about: str = ""
    label = ""


@dataclass(frozen=True)
class Lines:
    """Paragraphs behind one label. listed: whether they are of one kind each, as in a list."""

    label: str
    texts: tuple[str, ...]
    style: str = ""
    listed: bool = False


@dataclass(frozen=True)
class Entry:
    """One line to find again, `path:line CODE message`, and what stands below it."""

    head: str
    notes: tuple[str, ...] = ()
    style: str = ""


@dataclass(frozen=True)
class Entries:
    """A list of entries. about: what they are, and how many; more: what is left out."""

    label: str
    about: str
    entries: tuple[Entry, ...]
    more: str = ""


@dataclass(frozen=True)
class Table:
    """Rows of text. bold: the row that matters most, by its number; texts: how many columns at the left are not numbers."""

    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    bold: int | None = None
    texts: int = 1


@dataclass(frozen=True)
class Code:
    """Lines to copy."""

    label: str
    text: str


Block = Title | Lines | Entries | Table | Code


class Look(NamedTuple):
    """Cells in a line, and whether they may be coloured."""

    width: int
    color: bool


def looks() -> Look:
    """Width and colour for this stdout: plain and 100 cells wide where nobody watches.

    FORCE_COLOR and NO_COLOR, set to anything but nothing, decide before what stdout is.
    """
    width = min(shutil.get_terminal_size().columns, WIDEST) if sys.stdout.isatty() else 100
    colored = bool(os.environ.get("FORCE_COLOR")) or (sys.stdout.isatty() and os.environ.get("TERM") != "dumb")
    return Look(width, colored and not os.environ.get("NO_COLOR"))


def to_terminal(blocks: Iterable[Block], look: Look) -> str:
    """The blocks as lines of at most `look.width` cells; heads of entries alone are never broken, so that they can be grepped."""
    stream = io.StringIO()
    console = Console(
        file=stream,
        width=max(look.width, 40),
        force_terminal=look.color,
        color_system="standard" if look.color else None,
        legacy_windows=False,
        highlight=False,
        markup=False,
        emoji=False,
        _environ={},
    )
    for i, block in enumerate(blocks):
        if i and (isinstance(block, Table) or block.label):
            console.print()
        for part in _parts(block):
            console.print(part, soft_wrap=isinstance(part, Text))
    return "".join(f"{_PADDING.sub('', line)}\n" for line in stream.getvalue().splitlines())


def _parts(block: Block) -> Iterator[RenderableType]:
    """What rich draws for a block. A Text stands in one line, however long."""
    match block:
        case Title(text, about):
            yield from (Padding(_text(line, style), 0) for line, style in ((text, "bold"), (about, "muted")) if line)
        case Lines(label, texts, style, listed):
            yield _beside(label, [f"- {text}" if listed else text for text in texts], style)
        case Table(heads, rows, bold, texts):
            yield _grid(heads, rows, bold, texts)
        case Code(label, text):
            yield _beside(label, text.splitlines(), "")
        case Entries(label, about, entries, more):
            yield _beside(label, [about], "")
            for entry in entries:
                yield _text(entry.head, entry.style)
                yield from (Padding(_text(note, "muted"), (0, 0, 0, 4)) for note in entry.notes)
            if more:
                yield _beside("", [more], "muted")


def _text(text: str, style: str = "") -> Text:
    return Text(printable(text), STYLES.get(style, ""), overflow="fold")


def _beside(label: str, texts: Sequence[str], style: str) -> Grid:
    grid = Grid.grid(padding=0)
    grid.add_column(width=LABEL)
    grid.add_column(overflow="fold")
    for i, text in enumerate(texts):
        grid.add_row(_text(label, "bold") if i == 0 else "", _text(text, style))
    return grid


def _grid(heads: Sequence[str], rows: Iterable[Sequence[str]], bold: int | None, texts: int) -> RenderableType:
    grid = Grid(box=None, show_edge=False, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for i, head in enumerate(heads):
        grid.add_column(printable(head), justify="left" if i < texts else "right", overflow="fold")
    for i, row in enumerate(rows):
        grid.add_row(*(_text(cell) for cell in row), style="bold" if i == bold else "")
    return grid


def to_markdown(blocks: Iterable[Block]) -> str:
    """GitHub-flavoured Markdown; names from the model cannot break out of cells or add markup."""
    return "\n".join(line for block in blocks for line in (*_markdown(block), "")).rstrip("\n") + "\n"


def _markdown(block: Block) -> Iterator[str]:
    match block:
        case Title(text, about):
            yield f"## {escape(text)}"
            if about:
                yield f"\n{escape(about)}"
        case Lines(label, texts, style, listed):
            head = f"{'> ' if style == 'warning' else ''}{f'**{escape(label)}**: ' if label else ''}"
            first, rest = ("", texts) if listed else (escape(texts[0]), texts[1:])
            yield f"{head}{first}" + ("\n" if rest else "")
            yield from (f"- {escape(text)}" for text in rest)
        case Table(heads, rows, bold, texts):
            yield _row(map(escape, heads))
            yield _row("---" if i < texts else "---:" for i in range(len(heads)))
            for i, row in enumerate(rows):
                yield _row(
                    f"**{escape(cell)}**" if i == bold and j == 0 else escape(cell) for j, cell in enumerate(row)
                )
        case Code(label, text):
            yield f"**{escape(label)}**\n\n```python\n{text.rstrip()}\n```"
        case Entries(label, about, entries, more):
            yield f"**{escape(label)}**: {escape(about)}\n"
            yield from ("  \n  ".join((f"- {code(entry.head)}", *map(escape, entry.notes))) for entry in entries)
            if more:
                yield f"- {escape(more)}"


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def code(text: str) -> str:
    """A code span that ends where it should, whatever the text holds."""
    text = printable(text) or " "
    fence = "`" * (max((len(run) for run in re.findall("`+", text)), default=0) + 1)
    space = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{fence}{space}{text}{space}{fence}"


def escape(text: str) -> str:
    """Prose without markup of its own."""
    return re.sub(r"([\\`*_\[\]<>|#~])", r"\\\1", printable(text))


def to_html(blocks: Iterable[Block]) -> str:
    """Plain HTML without script, style sheet or request, that takes its colours from what is around it."""
    return str(Markup("<div>{}</div>\n").format(Markup("\n").join(_html(block) for block in blocks)))


def _html(block: Block) -> Markup:
    match block:
        case Title(text, about):
            return _tagged("<p><strong>{}</strong> {}</p>", text, about)
        case Lines(label, texts):
            return _tagged("<p><strong>{}</strong> {}</p>", label, " ".join(texts))
        case Code(label, text):
            return _tagged("<p><strong>{}</strong></p>", label) + Markup("<pre>{}</pre>").format(text)
        case Table(heads, rows, _, texts):
            return _html_table(heads, rows, lambda i: "left" if i < texts else "right")
        case Entries(label, about, entries, more):
            items = [_tagged("<li><code>{}</code><br>{}</li>", entry.head, " ".join(entry.notes)) for entry in entries]
            listed = Markup("<ul>{}</ul>").format(Markup("").join(items)) if items else Markup("")
            return (
                _tagged("<p><strong>{}</strong> {}</p>", label, about)
                + listed
                + _tagged("<p>{}</p>" * bool(more), more)
            )


def _tagged(markup: str, *texts: str) -> Markup:
    return Markup(markup).format(*map(printable, texts))


def _html_table(heads: Sequence[str], rows: Iterable[Sequence[str]], align: Callable[[int], str]) -> Markup:
    def row(cells: Sequence[str], tag: str) -> Markup:
        made = (
            Markup(f'<{tag} style="text-align:{align(i)}">{{}}</{tag}>').format(printable(x))
            for i, x in enumerate(cells)
        )
        return Markup("<tr>{}</tr>").format(Markup("").join(made))

    body = Markup("").join(row(cells, "td") for cells in rows)
    return Markup("<table><thead>{}</thead><tbody>{}</tbody></table>").format(row(heads, "th"), body)
