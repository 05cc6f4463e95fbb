"""Writes the table of rooms into docs/architecture.md.

python -m tests.docs.draw_architecture
"""

import ast

from tests.support.structure import BANDS, PACKAGE

DOCS = PACKAGE.parent / "docs"
START, END = "<!-- rooms -->\n", "<!-- end of rooms -->"


def table() -> str:
    """Markdown: every room with the first sentence of its docstring, from the top down."""
    rows = ["| room | what it holds |", "|---|---|"]
    for band in reversed(BANDS.values()):
        rows += [f"| `{room}` | {summary(room)} |" for room in band]
    return "\n".join(rows) + "\n"


def summary(room: str) -> str:
    """The first paragraph of a room's docstring, in one line."""
    if room == "commands":
        return (
            "The verbs of features, and features that are verbs alone, such as rehearsals: these may run whole audits."
        )
    folder = PACKAGE / room
    file = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
    text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    return " ".join(text.split("\n\n")[0].split())


def page(old: str) -> str:
    """The page with its table of rooms written anew."""
    before, _, rest = old.partition(START)
    return before + START + table() + END + rest.partition(END)[2]


def main() -> None:
    file = DOCS / "architecture.md"
    file.write_text(page(file.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
