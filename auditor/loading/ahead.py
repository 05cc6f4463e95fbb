"""The libraries that a target's file imports before it does anything else, imported as that file would."""

from __future__ import annotations

import ast
import importlib.util
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from ..errors import LoadError
from . import hubs, weights
from .sandbox import user_code
from .target import Target, parse


def import_ahead(text: str, seed: int = 0) -> None:
    """Import what TARGET begins by importing, as far as that is installed packages alone; nothing of the user's runs.

    What cannot be imported is left to whoever loads the target, and says why.
    """
    with suppress(LoadError):
        target = parse(text)
        if target.hub:
            hubs.require(target)
        elif target.path is not None:
            with user_code(target.folders, seed, str(target.path)), weights.watching():
                _run(target.path, _shadowing(target))


def _run(file: Path, folders: tuple[Path, ...]) -> None:
    for statement in _leading(file):
        if not all(_is_installed(name, folders) for name in _packages(statement)):
            return
        try:
            exec(compile(ast.Module([statement], []), str(file), "exec"), {"__name__": file.stem})
        except (Exception, SystemExit):
            return


def _leading(file: Path) -> Iterator[ast.Import | ast.ImportFrom]:
    """The imports that the file begins with."""
    try:
        body = ast.parse(file.read_bytes()).body
    except (OSError, SyntaxError, ValueError, RecursionError):
        return
    for statement in body:
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
            continue  # what the file says of itself
        if not isinstance(statement, (ast.Import, ast.ImportFrom)):
            return
        yield statement


def _packages(statement: ast.Import | ast.ImportFrom) -> list[str]:
    """The outermost packages that a statement imports; "" for those that lie beside the file."""
    if isinstance(statement, ast.Import):
        return [alias.name.partition(".")[0] for alias in statement.names]
    return ["" if statement.level else (statement.module or "").partition(".")[0]]


def _shadowing(target: Target) -> tuple[Path, ...]:
    """Folders in which a module of the user's own may have a library's name."""
    return (*map(Path, target.folders), Path.cwd())


def _is_installed(name: str, folders: tuple[Path, ...]) -> bool:
    if name in sys.stdlib_module_names:
        return True
    if not name or any((folder / name).exists() or (folder / f"{name}.py").exists() for folder in folders):
        return False
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return False
    if spec is None or spec.origin is None:
        return False
    installed = {Path(sysconfig.get_path(where)).resolve() for where in ("purelib", "platlib")}
    return not installed.isdisjoint(Path(spec.origin).resolve().parents)
