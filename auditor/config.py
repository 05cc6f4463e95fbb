"""`[tool.auditor]` of the nearest pyproject.toml: defaults for the command line, and which findings are wanted."""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import AuditorError

_SELECTION = ("select", "ignore", "per_module_ignores")
_ENTRY = ("module", "code", "reason")


@dataclass(frozen=True)
class Ignore:
    """Findings not wanted: those whose code starts with `code`, in modules whose path the glob `module` matches.

    source: `pyproject.toml:line` of the entry; reason: why, in the user's words ("" where none is asked for).
    """

    code: str
    module: str = "*"
    reason: str = ""
    source: str = "pyproject.toml"


@dataclass(frozen=True)
class Selection:
    """Which findings an audit reports. select: prefixes of codes, none of them meaning all."""

    select: tuple[str, ...] = ()
    ignores: tuple[Ignore, ...] = ()


EVERYTHING = Selection()
"""Every rule, and nothing ignored."""


def selection(start: Path) -> Selection:
    """What `select`, `ignore` and `per-module-ignores` of the nearest [tool.auditor] say; everything if there is none.

    Raises: AuditorError(slug="bad-config"), naming the file and the key.
    """
    file, table = _nearest(start)
    text = file.read_text(encoding="utf-8") if table else ""
    ignores = [Ignore(code, source=_place(file, text, code)) for code in _codes(table, "ignore", file)]
    return Selection(_codes(table, "select", file), (*ignores, *_per_module(table, file, text)))


def read(start: Path, known: Collection[str]) -> dict[str, Any]:
    """The table's entries by option name (`max-error` is `max_error`); {} if no pyproject.toml at or above has one.

    A path counts from the folder of the file it is written in, under `inputs`, `evaluate` and `loss` too; a list becomes `a,b`, as on the command line, of criteria `a;b`.
    Raises: AuditorError(slug="bad-config"), naming the file and the key.
    """
    file, table = _nearest(start)
    return {name: _value(name, value, file) for name, value in _checked(table, known, file).items()}


def _nearest(start: Path) -> tuple[Path, dict[str, Any]]:
    for folder in (start, *start.parents):
        file = folder / "pyproject.toml"
        if file.is_file() and (table := _table(file)) is not None:
            return file, {key.replace("-", "_"): value for key, value in table.items()}
    return start / "pyproject.toml", {}


def _table(file: Path) -> dict[str, Any] | None:
    try:
        tool = tomllib.loads(file.read_text(encoding="utf-8")).get("tool", {})
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise AuditorError(f"{file}: {error}", slug="bad-config") from error
    table = tool.get("auditor")
    return table if isinstance(table, dict) else None


def _checked(table: dict[str, Any], known: Collection[str], file: Path) -> dict[str, Any]:
    options = {name: value for name, value in table.items() if name not in _SELECTION}
    for name in options:
        if name not in known:
            every = [*sorted(known), *_SELECTION]
            close = difflib.get_close_matches(name, every, n=1)
            hint = f"did you mean {close[0].replace('_', '-')}?" if close else f"known: {', '.join(every)}"
            raise AuditorError(f"{file}: [tool.auditor] has no key {name.replace('_', '-')!r}: {hint}", "bad-config")
    return options


def _value(name: str, value: Any, file: Path) -> Any:
    if isinstance(value, list):
        return (";" if name == "criterion" else ",").join(map(str, value))
    if isinstance(value, dict):
        raise AuditorError(f"{file}: [tool.auditor] {name} must be a plain value, not a table", slug="bad-config")
    return _from_its_folder(name, str(value), file.parent)


def _from_its_folder(name: str, value: str, folder: Path) -> str:
    """An option's value, its path counted from the folder: all of it, or what stands before `:name`, if that is a file."""
    if name in ("out", "rules", "baseline", "weights"):
        return str(folder / value)
    path = folder / value.partition(":")[0]
    return str(folder / value) if name in ("inputs", "evaluate", "loss") and path.is_file() else value


def _codes(table: dict[str, Any], name: str, file: Path) -> tuple[str, ...]:
    codes = table.get(name, [])
    if not isinstance(codes, list):
        raise AuditorError(f"{file}: [tool.auditor] {name} must be a list of codes", slug="bad-config")
    return tuple(_code(code, name, file) for code in codes)


def _code(code: Any, name: str, file: Path) -> str:
    if not isinstance(code, str) or not re.fullmatch(r"[A-Z]{3}\d{0,3}", code):
        raise AuditorError(
            f"{file}: [tool.auditor] {name}: {code!r} is neither a code such as NRM001 nor a family's letters",
            slug="bad-config",
        )
    return code


def _per_module(table: dict[str, Any], file: Path, text: str) -> list[Ignore]:
    entries = table.get("per_module_ignores", [])
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise AuditorError(f"{file}: [tool.auditor] per-module-ignores must be a list of tables", slug="bad-config")
    return [_entry(entry, file, text) for entry in entries]


def _entry(entry: dict[str, Any], file: Path, text: str) -> Ignore:
    for key in (*_ENTRY, *entry):
        value = entry.get(key)
        if key not in _ENTRY or not isinstance(value, str) or not value.strip():
            raise AuditorError(
                f"{file}: [tool.auditor] per-module-ignores: {key!r}: an entry has {', '.join(_ENTRY)}, each a string",
                slug="bad-config",
            )
    code = _code(entry["code"], "per-module-ignores", file)
    return Ignore(code, entry["module"], entry["reason"], _place(file, text, entry["module"]))


def _place(file: Path, text: str, value: str) -> str:
    """`pyproject.toml:line` of the first line that holds the value as a string; TOML readers keep no positions."""
    lines = text.splitlines()
    line = next((number for number, held in enumerate(lines, 1) if re.search(f"[\"']{re.escape(value)}[\"']", held)), 1)
    return f"{file.name}:{line}"
