"""The blocks that make up a page, and renderers of blocks for a terminal, Markdown and HTML."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import assert_never

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table as RichTable
from rich.text import Text

from ..resources import resource_dir
from . import words
from .words import parts, printable

STYLES = {"bold": "bold", "muted": "dim", "error": "red", "warning": "yellow", "info": "cyan", "good": "green"}
_PADDING = re.compile(r" +(?=(\x1b\[0m| )*$)")
LABEL = 10
"""Width of the label column on a terminal, in characters."""
WIDEST = 110
"""Maximum line width in characters, also on wider terminals, since longer lines are harder to read."""

WIDTH = 1080
LEFT, RIGHT, BOTTOM = 48, WIDTH - 8, 40
"""Pixels: a chart's left and right edges, and the height of the space below its horizontal axis."""
WIDE = 3
"""Number of columns from which a narrow screen shows each row of a table as a list of its cells."""


@dataclass(frozen=True)
class Prose:
    """Paragraphs under one label. listed: whether each paragraph is an item of a list. style: a class of the report's
    CSS, or `title` if the label is the title of the page."""

    label: str
    texts: tuple[str, ...]
    style: str = ""
    listed: bool = False

    def __bool__(self) -> bool:
        return any(self.texts) or self.style == "title"


@dataclass(frozen=True)
class Item:
    """A line that is never broken, such as `path:line:column CODE message`, with notes below it."""

    head: str
    notes: tuple[str, ...] = ()
    style: str = ""
    label = ""


@dataclass(frozen=True)
class Grid:
    """A table. bold: index of the row to highlight; texts: number of left-aligned columns, which come first."""

    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    bold: int | None = None
    texts: int = 1
    caption: str = ""
    label = ""

    def __bool__(self) -> bool:
        return bool(self.rows)


@dataclass(frozen=True)
class Code:
    """Lines of code to copy."""

    label: str
    text: str


@dataclass(frozen=True)
class Fold:
    """Content that the reader opens on demand; `label` summarizes it."""

    label: str
    blocks: tuple[Block, ...]


@dataclass(frozen=True)
class Chart:
    """A drawing, `height` pixels high. paths: (CSS class, SVG path); legend: (CSS class, words); x_ticks, y_ticks:
    (pixel, words). rows: for each point, the row of the layer table that a click opens. titled: whether the label
    stands above the drawing. names: (x, y, SVG text-anchor, words) beside points. width: of the drawing in pixels; a
    drawing of less than WIDTH fits a phone."""

    label: str
    about: str
    height: int
    paths: tuple[tuple[str, str], ...]
    legend: tuple[tuple[str, str], ...]
    x_title: str
    x_ticks: tuple[tuple[float, str], ...] = ()
    y_ticks: tuple[tuple[float, str], ...] = ()
    rows: tuple[int, ...] = ()
    titled: bool = True
    names: tuple[tuple[float, float, str, str], ...] = ()
    width: int = WIDTH

    @property
    def right(self) -> int:
        """The right edge of the axes, in pixels."""
        return self.width - WIDTH + RIGHT


@dataclass(frozen=True)
class Columns:
    """Blocks that stand side by side on a wide screen."""

    left: tuple[Block, ...]
    right: tuple[Block, ...]
    label = ""


Block = Prose | Item | Grid | Code | Fold | Chart | Columns
"""Folds, charts and columns appear only in HTML. A Prose or Grid without content is falsy, and not rendered."""


def rule_text(title: str, text: str) -> list[Block]:
    """The blocks of a rule's text: paragraphs, the first with the title, and code to copy."""
    blocks = list[Block]()
    for part, is_code in parts(text):
        if is_code:
            blocks.append(Code("", part))
        else:
            blocks.append(Prose("" if blocks else title, (part,)))
    return blocks


def to_terminal(blocks: Iterable[Block], width: int | None = None, color: bool | None = None) -> str:
    """Render blocks as lines of at most `width` characters. Only the head of an Item is never broken, so that grep
    finds it.

    Width and color follow stdout by default: without a terminal, 100 characters and no colors. FORCE_COLOR turns colors
    on and NO_COLOR turns them off, if not empty.
    """
    seen = sys.stdout.isatty()
    wide = min(shutil.get_terminal_size().columns, WIDEST) if seen else 100
    if color is None:
        color = bool(os.environ.get("FORCE_COLOR")) or (seen and os.environ.get("TERM") != "dumb")
        color = color and not os.environ.get("NO_COLOR")
    console = Console(
        width=max(width or wide, 40),
        force_terminal=color,
        color_system="standard" if color else None,
        force_jupyter=False,
        _environ={},  # whose colors and width were decided above
        legacy_windows=False,
        highlight=False,
        markup=False,
        emoji=False,
    )
    with console.capture() as page:
        for i, block in enumerate(block for block in blocks if block):
            if i and (isinstance(block, Grid) or block.label):
                console.print()
            for part in _parts(block):
                console.print(part, soft_wrap=isinstance(part, Text))
    return "".join(f"{_PADDING.sub('', line)}\n" for line in page.get().splitlines())


def _parts(block: Block) -> Iterator[RenderableType]:
    """Convert a block to objects that the library rich renders. Parts of type Text are printed unwrapped."""
    match block:
        case Prose(label, texts, "title"):
            yield from (Padding(_text(label, "bold"), 0), *(Padding(_text(text, "muted"), 0) for text in texts))
        case Prose(label, texts, style, listed):
            yield _beside(label, [f"- {text}" if listed else text for text in texts], style)
        case Grid(heads, rows, bold, texts):
            grid = RichTable(box=None, show_edge=False, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
            for i, head in enumerate(heads):
                grid.add_column(printable(head), justify="left" if i < texts else "right", overflow="fold")
            for i, row in enumerate(rows):
                grid.add_row(*map(_text, row), style="bold" if i == bold else "")
            yield grid
        case Code(label, text):
            yield _beside(label, text.splitlines(), "")
        case Item(head, notes, style):
            yield _text(head, style)
            yield from (Padding(_text(note, "muted"), (0, 0, 0, 4)) for note in notes)
        case Fold() | Chart() | Columns():
            return  # of HTML alone
        case _:
            assert_never(block)


def _text(text: str, style: str = "") -> Text:
    return Text(printable(text), STYLES.get(style, ""), overflow="fold")


def _beside(label: str, texts: Sequence[str], style: str) -> RichTable:
    grid = RichTable.grid(padding=0)
    grid.add_column(width=LABEL)
    grid.add_column(overflow="fold")
    for i, text in enumerate(texts):
        grid.add_row(_text(label, "bold") if i == 0 else "", _text(text, style))
    return grid


def to_markdown(blocks: Iterable[Block]) -> str:
    """Render blocks as GitHub-flavored Markdown; names from the model are escaped."""
    return "\n".join(line for block in blocks if block for line in (*_markdown(block), "")).rstrip("\n") + "\n"


def _markdown(block: Block) -> Iterator[str]:
    """The paragraphs of a block in Markdown."""
    match block:
        case Prose(label, texts, "title"):
            yield "\n\n".join((f"## {escape(label)}", *map(escape, texts)))
        case Prose(label, texts, style, listed):
            head = "> " if style == "warning" else ""
            if label:
                head += f"**{escape(label)}**: "
            items = texts
            if not listed:
                head += escape(texts[0])
                items = texts[1:]
            yield head + ("\n" if items else "")
            for item in items:
                yield f"- {escape(item)}"
        case Grid(heads, rows, bold, texts):
            yield _row(map(escape, heads))
            yield _row("---" if i < texts else "---:" for i in range(len(heads)))
            for i, row in enumerate(rows):
                first, *others = map(escape, row)
                yield _row((f"**{first}**" if i == bold else first, *others))
        case Code(label, text):
            yield f"**{escape(label)}**\n\n```python\n{text.rstrip()}\n```"
        case Item(head, notes):
            yield "  \n  ".join((f"- {code(head)}", *map(escape, notes)))
        case Fold() | Chart() | Columns():
            return  # of HTML alone
        case _:
            assert_never(block)


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def code(text: str) -> str:
    """A Markdown code span that is valid for any text."""
    text = printable(text) or " "
    fence = "`" * (max((len(run) for run in re.findall("`+", text)), default=0) + 1)
    space = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{fence}{space}{text}{space}{fence}"


def escape(text: str) -> str:
    """Escape Markdown in prose."""
    return re.sub(r"([\\`*_\[\]<>|#~])", r"\\\1", printable(text))


def html(blocks: Iterable[Block]) -> Markup:
    """Render blocks as HTML with the CSS classes of the report, each by the macro of blocks.html.jinja with the name of
    its class. A page that does not define the classes, such as a notebook, shows the blocks in its own style."""
    macros = environment().get_template("blocks.html.jinja").module
    return Markup("\n").join(getattr(macros, type(block).__name__)(block) for block in blocks if block)


def prose(text: str) -> Markup:
    """Escape text for HTML; text in `backticks` becomes code."""
    line = Markup.escape(printable(" ".join(text.split())))
    return line if line.count("`") % 2 else Markup(re.sub("`([^`]*)`", r"<code>\1</code>", str(line)))


@cache
def environment() -> Environment:
    """The Jinja environment, created once, which escapes values, raises for undefined names, and can inline files."""
    folder = resource_dir("reports")
    made = Environment(
        loader=FileSystemLoader(folder),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    made.policies["json.dumps_kwargs"] = {"sort_keys": True, "separators": (",", ":")}
    made.globals.update(
        asset=lambda name: Markup((folder / name).read_text(encoding="utf-8")), words=words, rule_text=rule_text
    )
    made.globals.update(WIDTH=WIDTH, LEFT=LEFT, BOTTOM=BOTTOM, WIDE=WIDE)
    made.filters.update(sentence=words.sentence, prose=prose, show=words.printable, html=html)
    return made
