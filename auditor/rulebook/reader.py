"""A TOML table read key by key: every wrong key, type or value becomes a RuleError with file, line and key."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NoReturn

from ..errors import RuleError


class Reader:
    """One table of a rule file; `key` is its dotted path in the file, "" at the top."""

    def __init__(self, path: Path, text: str, table: Mapping[str, Any], key: str = "") -> None:
        self.path, self._text, self.table, self.key = path, text, table, key

    def fail(self, key: str, problem: str, slug: str) -> NoReturn:
        """Raise a RuleError that points at `key` of this table."""
        full = f"{self.key}.{key}".strip(".")
        full = full if full.isprintable() else ascii(full)
        raise RuleError(f"{self.path}:{self._line(key)}: {full or 'file'}: {problem}", slug=slug)

    def allow(self, names: Collection[str]) -> None:
        """Refuse keys outside `names`."""
        for name in self.table:
            if name not in names:
                self.fail(name, f"unknown key; known here: {', '.join(sorted(names))}", "rule-unknown-key")

    def text(self, name: str, choices: Collection[str] = (), pattern: str = "") -> str:
        """A required string: not blank, one of `choices`, matching `pattern`."""
        value = self._required(name, str, "a string")
        if not value.strip():
            self.fail(name, "must not be empty", "rule-bad-value")
        if choices and value not in choices:
            self.fail(name, f"{value!r} is not one of {', '.join(choices)}", "rule-bad-value")
        if pattern and not re.fullmatch(pattern, value):
            self.fail(name, f"{value!r} does not have the form {pattern}", "rule-bad-value")
        return str(value)

    def flag(self, name: str) -> bool:
        """A required true or false."""
        return bool(self._required(name, bool, "true or false"))

    def texts(self, name: str, choices: Collection[str] = ()) -> tuple[str, ...]:
        """A required, non-empty list of strings."""
        value = self._required(name, list, "a list of strings")
        if not value or not all(isinstance(item, str) and item.strip() for item in value):
            self.fail(name, "must be a non-empty list of strings", "rule-bad-type")
        for item in value:
            if choices and item not in choices:
                self.fail(name, f"{item!r} is not one of {', '.join(choices)}", "rule-bad-value")
        return tuple(value)

    def reader(self, name: str) -> Reader:
        """A required sub-table."""
        return Reader(self.path, self._text, self._required(name, dict, "a table"), f"{self.key}.{name}".strip("."))

    def readers(self, name: str) -> list[Reader]:
        """A required list of sub-tables; it may be empty."""
        value = self._required(name, list, "a list of tables")
        if not all(isinstance(item, dict) for item in value):
            self.fail(name, "must be a list of tables", "rule-bad-type")
        full = f"{self.key}.{name}".strip(".")
        return [Reader(self.path, self._text, item, f"{full}[{index}]") for index, item in enumerate(value)]

    def _required(self, name: str, kind: type, words: str) -> Any:
        if name not in self.table:
            self.fail(name, "is missing", "rule-missing-key")
        if not isinstance(self.table[name], kind):
            self.fail(name, f"must be {words}, not {type(self.table[name]).__name__}", "rule-bad-type")
        return self.table[name]

    def _line(self, key: str) -> int:
        """Line of the key where it is written, of its table's header or name otherwise, else 1.

        TOML readers keep no positions, so the text is searched, table by table on the way to the key; of tables in a list
        the first that has the key is taken.
        """
        at = 0
        for name in [*re.sub(r"\[\d+\]", "", self.key).split("."), key]:
            pattern = rf"(?:^\s*|[{{,]\s*|^\[+[\w.]*){re.escape(name)}(?:\s*=|\]|\.)"
            found = re.compile(pattern, re.MULTILINE).search(self._text, at) if name else None
            at = found.end() if found else at
        return self._text.count("\n", 0, at) + 1
