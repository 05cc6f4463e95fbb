"""The house stays in order: imports go down, nothing goes in circles, nothing grows too long to read."""

import ast

import networkx as nx

from tests.support.structure import ORDER, imports, modules, room, tree

INTERPRETER = ("execution.execute", "Executor")

CHECK = "capture.builder"
"""A recording that is called, as it is when it is held against the run that it is of: it lies below the Executor."""


def test_no_module_imports_itself_in_a_circle() -> None:
    """Imports inside functions, and those for the type checker alone, count too."""
    assert [circle for circle in nx.strongly_connected_components(imports()) if len(circle) > 1] == []


def test_imports_go_down() -> None:
    known = {name for name in modules() if name}
    assert {room(name) for name in known} - {"__main__"} == set(ORDER)
    height = {name: index for index, name in enumerate(ORDER)} | {"__main__": len(ORDER), "": -1}
    upwards = [(a, b) for a, b in imports().edges if height[room(a)] < height[room(b)] and a]
    assert upwards == []


def test_no_room_takes_private_names_of_another() -> None:
    taken = [
        (name, alias.name)
        for name in modules()
        for node in ast.walk(tree(name))
        if isinstance(node, ast.ImportFrom) and node.level > 1
        for alias in node.names
    ]
    assert [one for one in taken if one[1].startswith("_") and one[1][1] != "_"] == []


def last_name(node: ast.AST) -> str:
    """`Interpreter` of `fx.Interpreter`; "" of what is no name."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def test_only_the_executor_runs_a_recorded_graph() -> None:
    """There is no other interpreter, of torch's or of ours, and nobody else uses torch's."""
    nodes = [(name, node) for name in modules() for node in ast.walk(tree(name))]
    classes = [(name, node) for name, node in nodes if isinstance(node, ast.ClassDef)]
    own = [(name, one.name) for name, one in classes if {"Interpreter", "Executor"} & {*map(last_name, one.bases)}]
    assert own == [INTERPRETER]
    users = {
        name
        for name, node in nodes
        if last_name(node) == "Interpreter"
        or (isinstance(node, ast.ImportFrom) and any(alias.name == "Interpreter" for alias in node.names))
    }
    assert users == {INTERPRETER[0], CHECK}
