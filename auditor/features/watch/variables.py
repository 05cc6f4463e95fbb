"""Numbers that user code changes from step to step: global and outer variables of the step, and attributes of modules."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

KINDS = (bool, int, float)
OWN = ("training", "call_super_init", "dump_patches")
"""Attributes of every module."""


class Variables:
    """The numbers that a step's function reads by name, and those that are attributes of the user's own modules.

    Modules of torch keep no numbers that a step changes.
    """

    def __init__(self, step: Callable[..., Any] | None, model: nn.Module) -> None:
        function = inspect.unwrap(step) if callable(step) else None
        code = getattr(function, "__code__", None)
        self._scope: dict[str, Any] = getattr(function, "__globals__", {})
        self._globals = [name for name in getattr(code, "co_names", ()) if type(self._scope.get(name)) in KINDS]
        cells = getattr(function, "__closure__", None) or ()
        self._cells = dict(zip(getattr(code, "co_freevars", ()), cells, strict=False))
        self._attributes = [
            (f"{path}.{name}", module, name)
            for path, module in model.named_modules()
            if not type(module).__module__.startswith("torch.")
            for name, value in vars(module).items()
            if type(value) in KINDS and name not in OWN
        ]

    def values(self) -> dict[str, Any]:
        """{name: number} now. Attributes have the path of their module."""
        found = {name: self._scope.get(name) for name in self._globals}
        for name, cell in self._cells.items():
            value = _content(cell)
            if type(value) in KINDS:
                found[name] = value
        for path, module, name in self._attributes:
            found[path] = getattr(module, name, None)
        return found

    def restore(self, values: Mapping[str, Any]) -> None:
        """Set the numbers that have a value, wherever the user's code has them now."""
        for name in self._globals:
            if name in values:
                self._scope[name] = values[name]
        for name, cell in self._cells.items():
            if name in values and type(_content(cell)) in KINDS:
                cell.cell_contents = values[name]
        for path, module, name in self._attributes:
            if path in values:
                setattr(module, name, values[path])


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None
