"""The tables of options in docs/command-line.md and docs/api.md, made of the settings: `python -m tests.docs.options`."""

from __future__ import annotations

import re
from pathlib import Path

from auditor.asked import Command, flag_of
from auditor.settings import Option, Settings, either, options_of

DOCS = Path(__file__).resolve().parents[2] / "docs"
HEADS = {"command-line.md": "option", "api.md": "argument"}
TABLE = re.compile(r"(?<=<!-- options -->\n).*?(?=<!-- end of options -->)", re.DOTALL)


def table(document: str) -> str:
    """A row for every option, with its choices and its default."""
    line = document == "command-line.md"
    rows = []
    for name, option in options_of(Command if line else Settings).items():
        if line and option.flag is None:
            continue
        called = [f"`{name}`"] if not line else ["`-q`"] * (name == "quiet") + [f"`{flag_of(name)}`"]
        rows.append(f"| {', '.join(called)} | {_said(name, option)} |")
    return "\n".join([f"| {HEADS[document]} | meaning |", "|---|---|", *rows]) + "\n"


def _said(name: str, option: Option) -> str:
    default = Command.model_fields[name].default
    given = [
        f"`{one}`" for one in (default if isinstance(default, tuple) else (default,)) if one not in (None, "", False)
    ]
    choices = [f"`{one}`" for one in option.choices()] if option.choices else []
    named = "" if all(one in option.help for one in choices) else f"{either(choices)}: "
    unless = f"; {' and '.join(given)} unless given" if given else ""
    return f"{named}{option.help}{unless}".replace("|", "\\|")


def written(document: str) -> str:
    """The document with the table as it is to be."""
    return TABLE.sub(lambda found: table(document), (DOCS / document).read_text(encoding="utf-8"))


if __name__ == "__main__":
    for document in HEADS:
        (DOCS / document).write_text(written(document), encoding="utf-8")
