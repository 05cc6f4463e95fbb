"""What capture, execution and measure may not import."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import auditor

ROOT = Path(auditor.__file__).parent
ABOVE = {"measure", "rulebook", "verify", "plan", "graphs", "training", "document", "report"}
UNKNOWN = {
    "capture": ABOVE | {"execution", "artefact"},
    "execution": ABOVE | {"capture"},
    "measure": ABOVE - {"measure"},
}
"""{room: rooms that it does not import}."""


def imports(file: Path) -> list[tuple[str, str]]:
    """(room, name) of everything that a module takes from other rooms of the package."""
    found = []
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level == 2 and node.module:
            found += [(node.module.partition(".")[0], alias.name) for alias in node.names]
    return found


@pytest.mark.parametrize("room", UNKNOWN)
def test_a_room_imports_nothing_that_lies_above_or_beside_it(room: str) -> None:
    files = sorted((ROOT / room).rglob("*.py"))
    taken = {(file.name, other) for file in files for other, _ in imports(file)}
    assert len(files) > 2
    assert {other for _, other in taken} >= {"numerics"}
    assert {(name, other) for name, other in taken if other in UNKNOWN[room]} == set()


def test_no_room_takes_private_names_of_another() -> None:
    files = sorted(ROOT.rglob("*.py"))
    assert [(str(f), name) for f in files for _, name in imports(f) if name.startswith("_") and name[1] != "_"] == []
