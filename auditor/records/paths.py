"""Module paths in PyTorch's notation: names joined by dots, "" for the root."""

from __future__ import annotations

import re
from collections.abc import Container
from typing import Any


def nearest(path: str, known: Container[str]) -> str | None:
    """The longest path in `known` that equals `path` or encloses it; None if no known path does."""
    while path and path not in known:
        path = path.rpartition(".")[0]
    return path if path in known else None


def nearest_above(path: str, known: Container[str]) -> str | None:
    """The longest path in `known` that is a proper parent of `path`; None if no known path is, as for the root."""
    return nearest(path.rpartition(".")[0], known) if path else None


def enclosing_paths(path: str) -> list[str]:
    """A path and all its parents, the root first."""
    parts = path.split(".") if path else []
    return ["", *(".".join(parts[: i + 1]) for i in range(len(parts)))]


def within(path: str, scope: str) -> bool:
    """Whether a module path is a scope or lies inside it; everything lies inside the root."""
    return not scope or path == scope or path.startswith(f"{scope}.")


def function_in(owner: str, name: str) -> str:
    """The path `owner..name`, which stands for all calls of one function in a module. No module's path has two dots in a
    row, so that the two kinds of paths cannot be confused."""
    return f"{owner}..{name}"


def of_function(path: str) -> tuple[str, str] | None:
    """Module and function of a path from `function_in`; None for a module's path."""
    owner, dots, name = path.rpartition("..")
    return (owner, name) if dots else None


FP32_OUTPUT = " (low inputs, FP32 output)"
"""Suffix of the path of a function whose products have low-precision inputs and FP32 output."""


def module_of(path: str) -> str:
    """The module of a path; for a path from `function_in`, the module that calls the function."""
    result = of_function(path)
    return path if result is None else result[0]


def pattern(path: str) -> str:
    """A module path with `*` for its block numbers: `blocks.3.norm` -> `blocks.*.norm`."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", path)


def place_of(at: Any) -> str:
    """A node or a finding in words: source line and operation; without a source line, its module with `*` for block
    numbers."""
    return f"{at.source or pattern(at.owner)} {at.op.split('.')[1] if '.' in at.op else at.op}"
