"""Finds torch functions by their names in precision plans. `patched_model.py` copies this from `function_name` on."""

from __future__ import annotations

import functools
from typing import Any

from torch.overrides import get_overridable_functions


def function_name(function: Any) -> str:
    """A torch function's name in plans: "pow" for torch.pow, x.pow and x ** 2; "" for an in-place function."""
    name: str = getattr(function, "__name__", "")
    return "" if name.endswith("_") and not name.startswith("__") else name.strip("_")


@functools.cache
def functions_by_name() -> dict[str, tuple[Any, ...]]:
    """{name: torch's functions of this name}, for all functions that a precision plan can keep in FP32."""
    result: dict[str, dict[Any, None]] = {}
    for functions in get_overridable_functions().values():
        for function in functions:
            result.setdefault(function_name(function), {})[function] = None
    return {name: tuple(functions) for name, functions in result.items() if name}
