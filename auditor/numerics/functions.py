"""Functions of torch by name, as a mode is told of them. From function_name on it is copied into `patched_model.py`."""

from __future__ import annotations

import functools
from typing import Any

from torch.overrides import get_overridable_functions


def function_name(function: Any) -> str:
    """What `keep` calls a function of torch: "pow" for torch.pow, x.pow and x ** 2; nothing for one in place."""
    name: str = getattr(function, "__name__", "")
    return "" if name.endswith("_") and not name.startswith("__") else name.strip("_")


@functools.cache
def functions_by_name() -> dict[str, tuple[Any, ...]]:
    """All functions of torch that can be kept."""
    result: dict[str, dict[Any, None]] = {}
    for functions in get_overridable_functions().values():
        for function in functions:
            result.setdefault(function_name(function), {})[function] = None
    return {name: tuple(functions) for name, functions in result.items() if name}
