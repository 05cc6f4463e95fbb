"""What is made of the settings: the tables of options in docs/command-line.md and docs/api.md, and
auditor/__init__.pyi, which tells editors and type checkers what `auditor.audit` takes: `python -m
tests.docs.options`."""

import inspect
import re
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import auditor
from auditor.asked import Command
from auditor.settings import Option, Settings, either, options_of, with_flags

DOCS = Path(__file__).resolve().parents[2] / "docs"
HEADS = {"command-line.md": "option", "api.md": "argument"}
TABLE = re.compile(r"(?<=<!-- options -->\n).*?(?=<!-- end of options -->)", re.DOTALL)


def table(document: str) -> str:
    """A row for every option, with its choices and its default."""
    line = document == "command-line.md"
    rows = []
    for name, option in options_of(Command if line else Settings).items():
        if line and not option.flag:
            continue
        called = [f"`{name}`"] if not line else ["`-q`"] * (name == "quiet") + [f"`{option.flag}`"]
        rows.append(f"| {', '.join(called)} | {_said(name, option, line)} |")
    return "\n".join([f"| {HEADS[document]} | meaning |", "|---|---|", *rows]) + "\n"


def _said(name: str, option: Option, line: bool) -> str:
    default = Command.model_fields[name].default
    given = [
        f"`{one}`" for one in (default if isinstance(default, tuple) else (default,)) if one not in (None, "", False)
    ]
    choices = [f"`{one}`" for one in option.choices()] if option.choices and option.takes == Option.takes else []
    named = "" if all(one in option.help for one in choices) else f"{either(choices)}: "
    standard = f"; default: {' and '.join(given)}" if given else ""
    said = with_flags(option.help) if line else option.help
    return f"{named}{said}{standard}".replace("|", "\\|")


def written(document: str) -> str:
    """The document with the table as it is to be."""
    return TABLE.sub(lambda found: table(document), (DOCS / document).read_text(encoding="utf-8"))


STUB = Path(auditor.__file__).with_suffix(".pyi")


def stub() -> str:
    """The public names, and the keywords of `audit` with the types that may be given."""
    lines = [
        '"""What editors and type checkers see of the package. `make docs` writes it, from the settings."""',
        "",
        "from collections.abc import Callable, Iterable",
        "from os import PathLike",
        "from typing import Any",
        "",
        "import torch",
        "from torch import nn",
        "",
        *sorted(f"from .{module} import {name} as {name}" for name, module in auditor._API.items() if name != "audit"),
        "",
        "__version__: str",
        "",
        "def audit(",
        "    model: nn.Module,",
        "    example_inputs: Any,",
        "    *,",
    ]
    kinds = get_type_hints(Settings)
    for name, option in options_of(Settings).items():
        default = repr(Settings.model_fields[name].default).replace("'", '"')
        lines.append(f"    {name}: {option.typed or _typed(kinds[name])} = {default},")
    return "\n".join([*lines, ") -> Audit: ...", ""])


def _typed(kind: Any) -> str:
    if isinstance(kind, UnionType) or get_origin(kind) is Union:
        return " | ".join(map(_typed, get_args(kind)))
    return "None" if kind is NoneType else re.sub(r"(collections\.abc|typing)\.", "", inspect.formatannotation(kind))


if __name__ == "__main__":
    STUB.write_text(stub(), encoding="utf-8")
    for document in HEADS:
        (DOCS / document).write_text(written(document), encoding="utf-8")
