"""Draws docs/architecture.svg from the imports, and writes the table of rooms into docs/architecture.md.

python -m tests.docs.draw_architecture
"""

from __future__ import annotations

import ast
from html import escape

import networkx as nx

from tests.structure import BANDS, PACKAGE, rooms
from tests.unit.test_budgets import BUDGET, LOOSE

DOCS = PACKAGE.parent / "docs"
START, END = "<!-- rooms -->\n", "<!-- end of rooms -->"
LEFT, WIDE, HIGH, GAP, DOWN = 84, 96, 30, 16, 84
ACROSS = WIDE + GAP
STYLE = """
text { font: 13px system-ui, sans-serif; fill: #1f2937 }
.band { font-size: 11px; fill: #6b7280 }
rect { fill: #f3f4f6; stroke: #9ca3af }
path { fill: none; stroke: #9ca3af }
@media (prefers-color-scheme: dark) {
  text { fill: #e5e7eb } .band { fill: #9ca3af } rect { fill: #1f2937; stroke: #6b7280 } path { stroke: #6b7280 }
}
"""


def picture() -> str:
    """Rooms in bands, a line down to every room that one imports and that none on the way does; the ground has none."""
    at = {
        room: (LEFT + ACROSS * column, 12 + DOWN * row)
        for row, band in enumerate(reversed(BANDS.values()))
        for column, room in enumerate(band)
    }
    width, height = LEFT + ACROSS * max(map(len, BANDS.values())), DOWN * len(BANDS) - 24
    above = rooms()
    above.remove_nodes_from(BANDS["ground"])
    lines = [_line(*at[source], *at[target]) for source, target in sorted(nx.transitive_reduction(above).edges)]
    labels = [
        f'<text class="band" x="4" y="{12 + DOWN * row + 19}">{escape(band)}</text>'
        for row, band in enumerate(reversed(BANDS))
    ]
    boxes = [_box(room, x, y) for room, (x, y) in at.items()]
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" aria-label="Rooms of the package">'
    return "\n".join([head, f"<style>{STYLE}</style>", *lines, *labels, *boxes, "</svg>"]) + "\n"


def _line(x: int, y: int, to_x: int, to_y: int) -> str:
    """From a box to one below it; between the boxes of the bands on the way, not behind them."""
    x, to_x = x + WIDE // 2, to_x + WIDE // 2
    if y == to_y:  # in one band: an arc below it
        return f'<path d="M{x} {y + HIGH} C{x} {y + HIGH + 22} {to_x} {y + HIGH + 22} {to_x} {y + HIGH}"/>'
    path, at, bottom = f"M{x} {y + HIGH}", x, y + HIGH
    for row in range(y + DOWN, to_y, DOWN):
        gap = LEFT - GAP // 2 + ACROSS * round((x + (to_x - x) * (row - y) / (to_y - y) - LEFT + GAP // 2) / ACROSS)
        path += f"{_curve(at, bottom, gap, row)} V{row + HIGH}"
        at, bottom = gap, row + HIGH
    return f'<path d="{path}{_curve(at, bottom, to_x, to_y)}"/>'


def _curve(x: int, y: int, to_x: int, to_y: int) -> str:
    middle = (y + to_y) // 2
    return f" C{x} {middle} {to_x} {middle} {to_x} {to_y}"


def _box(room: str, x: int, y: int) -> str:
    return (
        f'<rect x="{x}" y="{y}" width="{WIDE}" height="{HIGH}" rx="5"/>'
        f'<text x="{x + WIDE // 2}" y="{y + 20}" text-anchor="middle">{escape(room)}</text>'
    )


def table() -> str:
    """Markdown: every room with the first sentence of its docstring and its budget, from the top down; loose files have one."""
    rows = ["| room | what it holds | lines, at most |", "|---|---|---|"]
    for band in reversed(BANDS.values()):
        rows += [f"| `{room}` | {summary(room)} | {_most(room)} |" for room in band]
    rows.append(f"| | all files that are a room by themselves | {_most(LOOSE)} |")
    return "\n".join(rows) + "\n"


def _most(room: str) -> str:
    return f"{BUDGET[room][0]:,}" if room in BUDGET else ""


def summary(room: str) -> str:
    """The first paragraph of a room's docstring, in one line."""
    folder = PACKAGE / room
    file = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
    text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    return " ".join(text.split("\n\n")[0].split())


def page(old: str) -> str:
    """The page with its table of rooms written anew."""
    before, _, rest = old.partition(START)
    return before + START + table() + END + rest.partition(END)[2]


def main() -> None:
    (DOCS / "architecture.svg").write_text(picture(), encoding="utf-8")
    file = DOCS / "architecture.md"
    file.write_text(page(file.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
