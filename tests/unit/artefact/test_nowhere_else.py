"""No module asks a strategy for its name where it could ask for what it does, but for what is true of that one alone."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from auditor.artefact.strategies import SHIPPED
from tests.support.structure import PACKAGE

ALLOWED = {
    "artefact": "their own files, and the list of those that ship; what becomes of a scope's output, `cast` or `keep`",
    "execution": "the training step of a model that is low as a whole: loss, gradients and weights",
    "measure": "the error of casting a value, one of three kinds",
    "plan": "what becomes of a scope's output, `cast` or `keep`",
    "records": "what becomes of a scope's output, `cast` or `keep`",
    "report": "training, which runs under autocast; operations that autocast protects and a model with cast weights does not",
    "rulebook": "facts: what autocast does with an operation, and under which of the two plain uses it is low",
    "snippets": "strategies that the tool can follow",
    "training": "training, which runs under autocast",
}
"""{room: what it means by the word}."""


def named(file: Path) -> Iterator[str]:
    """Strings that are the name of a strategy that ships, or begin with it as names of plans do."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        word = node.value if isinstance(node, ast.Constant) else None
        if isinstance(word, str) and (word in SHIPPED or word in {f"{name}_" for name in SHIPPED}):
            yield f"{file.name}:{node.lineno}: {word!r}"


def places() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for file in sorted(PACKAGE.rglob("*.py")):
        found.setdefault(file.relative_to(PACKAGE).parts[0], []).extend(named(file))
    return {room: names for room, names in found.items() if names}


def test_no_other_module_names_them() -> None:
    assert {room: found for room, found in places().items() if room not in ALLOWED} == {}


def test_the_list_names_no_room_that_has_stopped() -> None:
    assert set(ALLOWED) - set(places()) == set()
