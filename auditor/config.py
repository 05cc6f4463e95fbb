"""`[tool.auditor]` of the nearest pyproject.toml: defaults for the command line."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Collection
from pathlib import Path
from typing import Any

from .errors import AuditorError


def read(start: Path, known: Collection[str]) -> dict[str, Any]:
    """The table's entries by option name (`max-error` is `max_error`); {} if no pyproject.toml at or above has one.

    A path under `out` or `rules` counts from the file it is written in; a list becomes `a,b`, as on the command line.
    Raises: AuditorError(slug="bad-config"), naming the file and the key.
    """
    for folder in (start, *start.parents):
        file = folder / "pyproject.toml"
        if file.is_file() and (table := _table(file)) is not None:
            return {name: _value(name, value, file) for name, value in _checked(table, known, file).items()}
    return {}


def _table(file: Path) -> dict[str, Any] | None:
    try:
        tool = tomllib.loads(file.read_text(encoding="utf-8")).get("tool", {})
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise AuditorError(f"{file}: {error}", slug="bad-config") from error
    table = tool.get("auditor")
    return table if isinstance(table, dict) else None


def _checked(table: dict[str, Any], known: Collection[str], file: Path) -> dict[str, Any]:
    options = {key.replace("-", "_"): value for key, value in table.items()}
    for name in options:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0].replace('_', '-')}?" if close else f"known: {', '.join(sorted(known))}"
            raise AuditorError(f"{file}: [tool.auditor] has no key {name.replace('_', '-')!r}: {hint}", "bad-config")
    return options


def _value(name: str, value: Any, file: Path) -> Any:
    if isinstance(value, list):
        return ",".join(map(str, value))
    if isinstance(value, dict):
        raise AuditorError(f"{file}: [tool.auditor] {name} must be a plain value, not a table", slug="bad-config")
    return str(file.parent / value) if name in ("out", "rules") else str(value)
