"""Module paths as PyTorch writes them: names joined by dots, "" for the root."""

from __future__ import annotations

import re
from collections.abc import Container


def nearest(path: str, known: Container[str]) -> str | None:
    """The known path that a module belongs to: its own or the nearest above; None where there is none."""
    while path and path not in known:
        path = path.rpartition(".")[0]
    return path if path in known else None


def nearest_above(path: str, known: Container[str]) -> str | None:
    """The nearest known path above a module; None where there is none, and so for the root itself."""
    return nearest(path.rpartition(".")[0], known) if path else None


def enclosing(path: str) -> list[str]:
    """A path and all those above it, the root first."""
    parts = path.split(".") if path else []
    return ["", *(".".join(parts[: i + 1]) for i in range(len(parts)))]


def within(path: str, scope: str) -> bool:
    """Whether a module path is a scope or lies in it; everything lies in the root."""
    return not scope or path == scope or path.startswith(f"{scope}.")


def function_in(owner: str, name: str) -> str:
    """A path for the calls of one function in a module: below the module, and no module's, since none has an empty name."""
    return f"{owner}..{name}"


def of_function(path: str) -> tuple[str, str] | None:
    """Module and function of such a path; None for a module's."""
    owner, dots, name = path.rpartition("..")
    return (owner, name) if dots else None


def module_of(path: str) -> str:
    """The module of a path that may be a function's."""
    result = of_function(path)
    return path if result is None else result[0]


def pattern(path: str) -> str:
    """A module path with its block numbers blanked: `blocks.3.norm` -> `blocks.*.norm`."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", path)


def place(source: str | None, owner: str, op: str) -> str:
    """The line and operation of a node, or the modules that repeat it where no line of the user's is on the way."""
    return f"{source or pattern(owner)} {op.split('.')[1] if '.' in op else op}"
