"""The variables that a step's function reads: global and outer ones, and attributes of its object, also through other functions."""

from __future__ import annotations

import inspect
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch

FUNCTIONS = 64
"""Largest number of functions that are followed."""

_FOREIGN = (str(Path(torch.__file__).parent), str(Path(__file__).parents[2]), sysconfig.get_paths()["stdlib"], "<")
_INSTALLED = ("site-packages", "dist-packages")


def is_users(file: str) -> bool:
    """Whether a file contains the user's own code, and not Python's, torch's, this package's or an installed package's."""
    is_installed = any(folder in file for folder in _INSTALLED)
    return not is_installed and not file.startswith(_FOREIGN)


@dataclass(frozen=True)
class Place:
    """Where a variable lies: under `key` in a dict of globals or attributes, or in the cell of an outer variable."""

    name: str
    scope: dict[str, Any]
    key: str
    cell: Any = None

    def get(self) -> Any:
        """The present value; None if the variable is not assigned."""
        if self.cell is None:
            return self.scope.get(self.key)
        try:
            return self.cell.cell_contents
        except ValueError:
            return None

    def set(self, value: Any) -> None:
        """Assign a value."""
        if self.cell is None:
            self.scope[self.key] = value
        else:
            self.cell.cell_contents = value


def places_read(step: Callable[..., Any] | None) -> list[Place]:
    """The variables that `step` reads, and those that the user's functions among them read."""
    found: dict[str, Place] = {}
    waiting: list[Any] = [step]
    seen = set[CodeType]()
    for function in waiting:  # grows
        function = _bare(function)
        code: Any = getattr(function, "__code__", None)
        is_known = code is None or code in seen or len(seen) >= FUNCTIONS
        if is_known or (seen and not is_users(code.co_filename)):
            continue
        prefix = f"{function.__qualname__}." if seen else ""
        seen.add(code)
        waiting += _methods_of(function, code)
        for place in _places_of(function, code, prefix):
            found.setdefault(place.name, place)
            if isinstance(place.get(), FunctionType | MethodType | partial):
                waiting.append(place.get())
    return list(found.values())


def _methods_of(function: Any, code: CodeType) -> Iterator[Any]:
    """The methods of its own object that a method reads."""
    owner = getattr(function, "__self__", None)
    for name in _names_in(code):
        if isinstance(getattr(type(owner), name, None), FunctionType):
            yield getattr(owner, name)


def _bare(function: Any) -> Any:
    """The function inside decorators and partial functions."""
    while True:
        function = inspect.unwrap(function) if callable(function) else function
        if not isinstance(function, partial):
            return function
        function = function.func


def _places_of(function: Any, code: CodeType, prefix: str) -> Iterator[Place]:
    """The variables of one function. prefix: of the names of its outer variables and attributes."""
    scope = getattr(function, "__globals__", {})
    owner = getattr(function, "__self__", None)
    attributes = getattr(owner, "__dict__", {})
    for name in _names_in(code):
        if name in attributes:
            yield Place(f"{prefix}self.{name}", attributes, name)
        if name in scope:
            yield Place(name, scope, name)
    cells = getattr(function, "__closure__", None) or ()
    for name, cell in zip(code.co_freevars, cells, strict=False):
        yield Place(f"{prefix}{name}", {}, name, cell)


def _names_in(code: CodeType) -> list[str]:
    """Names of globals and attributes that a function and the functions inside it read."""
    names = list(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names += _names_in(constant)
    return list(dict.fromkeys(names))
