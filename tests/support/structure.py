"""What the package's imports say of its structure: rooms, who imports whom, and how long things are."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import networkx as nx

PACKAGE = Path(__file__).resolve().parents[2] / "auditor"

BANDS: dict[str, tuple[str, ...]] = {
    "ground": ("errors", "resources", "stages", "processes", "facade"),
    "nouns": ("records", "numerics", "offload"),
    "engine": ("isolation", "emulation", "capture", "loading", "criteria", "artefact", "execution", "training"),
    "evidence": ("measure", "rulebook"),
    "plans": ("score", "settings", "verify", "plan"),
    "telling": ("document", "snippets", "report"),
    "features": ("asked", "progress", "command", "features"),
    "entry": ("reporters", "flow", "results", "api", "fleet", "commands", "cli"),
}
"""Rooms from the bottom up: each imports from rooms named before it, never from one named after it."""

ORDER = [room for rooms in BANDS.values() for room in rooms]


@cache
def modules() -> dict[str, Path]:
    """{dotted name below `auditor`: file}; a package goes by its own name."""
    found = {}
    for file in sorted(PACKAGE.rglob("*.py")):
        parts = file.relative_to(PACKAGE).with_suffix("").parts
        parts = parts[:-1] if parts[-1] == "__init__" else parts
        found[".".join(parts)] = file
    return found


@cache
def tree(module: str) -> ast.Module:
    """The syntax tree of a module, parsed once for all tests."""
    return ast.parse(modules()[module].read_text(encoding="utf-8"))


def room(module: str) -> str:
    """The room that a module is in: the top package, or a top module by itself.

    Features that an audit runs have a stage. The others are commands of their own, which may run whole audits.
    """
    top, _, rest = module.partition(".")
    if top != "features" or "." not in rest:
        return top
    folder = PACKAGE / top / rest.partition(".")[0]
    return top if (folder / "stage.py").exists() and not rest.endswith(".command") else "commands"


@cache
def imports() -> nx.DiGraph:
    """Module -> module, by every import: of the module, inside its functions, and for the type checker alone."""
    known = modules()
    graph = nx.DiGraph()
    graph.add_nodes_from(known)
    for name, file in known.items():
        package = name.split(".") if file.name == "__init__.py" else name.split(".")[:-1]
        for statement in _imports(tree(name)):
            for target in _targets(statement, [part for part in package if part], known):
                if target != name:
                    graph.add_edge(name, target)
    return graph


def rooms() -> nx.DiGraph:
    """Room -> room, by the imports of their modules; the package's own two files left out."""
    graph = nx.DiGraph()
    for source, target in imports().edges:
        if room(source) != room(target) and {room(source), room(target)} <= set(ORDER):
            graph.add_edge(room(source), room(target))
    return graph


def _imports(module: ast.Module) -> Iterator[ast.ImportFrom]:
    return (node for node in ast.walk(module) if isinstance(node, ast.ImportFrom))


def _targets(statement: ast.ImportFrom, package: list[str], known: dict[str, Path]) -> Iterator[str]:
    if statement.level:
        base = package[: len(package) - statement.level + 1]
        path = ".".join([*base, *filter(None, [statement.module])])
    elif statement.module is not None and statement.module.partition(".")[0] == "auditor":
        path = statement.module.partition(".")[2]
    else:
        return
    for alias in statement.names:
        inner = f"{path}.{alias.name}".lstrip(".")
        if inner in known:
            yield inner
        elif path in known:
            yield path


def functions() -> Iterator[tuple[str, int]]:
    """(where, lines) of every function; the lines of its decorators and docstring count."""
    for name in modules():
        for node in ast.walk(tree(name)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield f"{name}.{node.name}", (node.end_lineno or 0) - node.lineno + 1
