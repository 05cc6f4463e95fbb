"""Only the Executor runs a recorded graph: there is no other interpreter."""

import ast
from collections.abc import Iterator

from tests.support.structure import modules

TREES = {name: ast.parse(file.read_text(encoding="utf-8")) for name, file in modules().items()}

INTERPRETERS = {("execution.execute", "Executor")}

CHECK = "capture.builder"
"""A recording that is called, as it is when it is held against the run that it is of: it lies below the Executor."""


def interpreters(tree: ast.AST) -> Iterator[str]:
    """Classes that are an interpreter of torch's or of ours."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and not {"Interpreter", "Executor"}.isdisjoint(map(last_name, node.bases)):
            yield node.name


def last_name(node: ast.AST) -> str:
    """`Interpreter` of `fx.Interpreter`; "" of what is no name."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def test_there_is_one_executor() -> None:
    assert {(name, found) for name, tree in TREES.items() for found in interpreters(tree)} == INTERPRETERS


def test_nobody_else_uses_the_interpreter_of_torch() -> None:
    users = {name for name, tree in TREES.items() if any(_names_it(node) for node in ast.walk(tree))}
    assert users == {name for name, _ in INTERPRETERS} | {CHECK}


def _names_it(node: ast.AST) -> bool:
    imported = isinstance(node, ast.ImportFrom) and any(alias.name == "Interpreter" for alias in node.names)
    return imported or last_name(node) == "Interpreter"
