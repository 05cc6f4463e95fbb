"""Moves every numeric threshold of the rule files by a quarter, up and down, and lists the moves that no case notices.

Run: python -m tests.slow.move_thresholds
"""

from __future__ import annotations

import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from auditor.resources import resource_dir
from auditor.rulebook.load import load_rules
from tests.rules.thresholds import Entry, departures, entries

_BOUND = re.compile(r"\b(?:above|at_least|below|at_most|equals|contains) = (-?[0-9][0-9._e+-]*)")
_SHARE = 0.25


@dataclass(frozen=True)
class Move:
    """One number in one file, and what it becomes. start, end: where it stands in the text."""

    file: Path
    start: int
    end: int
    old: str
    new: str

    def __str__(self) -> str:
        line = self.file.read_text(encoding="utf-8").count("\n", 0, self.start) + 1
        return f"{self.file.name}:{line}: {self.old} -> {self.new}"


def moves(rules: Path) -> Iterator[Move]:
    """Both moves of every number that a condition compares with."""
    for file in sorted(rules.glob("*/*.toml")):
        for match in _BOUND.finditer(file.read_text(encoding="utf-8")):
            for sign in (-1, 1):
                yield Move(file, *match.span(1), match[1], _moved(match[1], sign))


def survivors(found: list[Move]) -> list[Move]:
    """Moves after which every line of thresholds.toml still holds."""
    expected = entries()
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "rules"
        shutil.copytree(found[0].file.parents[1], copy)
        return [move for move in found if not _noticed(move, copy, expected)]


def _noticed(move: Move, copy: Path, expected: Sequence[Entry]) -> bool:
    text = move.file.read_text(encoding="utf-8")
    file = copy / move.file.parent.name / move.file.name
    file.write_text(text[: move.start] + move.new + text[move.end :], encoding="utf-8")
    try:
        return bool(departures(load_rules([copy]), expected))
    finally:
        file.write_text(text, encoding="utf-8")


def _moved(text: str, sign: int) -> str:
    """A quarter more or less; whole numbers by one at least, and 0 by a quarter of one."""
    value = float(text)
    if re.fullmatch(r"-?\d+", text) and value:
        return str(int(value) + sign * max(1, round(abs(value) * _SHARE)))
    return repr(value + sign * _SHARE * (abs(value) or 1.0))


def main() -> int:
    """Print how many moves there are and which survive; 1 if one does."""
    found = list(moves(resource_dir("rules")))
    unnoticed = survivors(found)
    print(f"{len(found) // 2} thresholds, {len(found)} moves, {len(unnoticed)} unnoticed", *unnoticed, sep="\n")
    return 1 if unnoticed else 0


if __name__ == "__main__":
    sys.exit(main())
