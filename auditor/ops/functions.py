"""Functions of torch by name, as a mode is told of them. From function_name on it is copied into `patched_model.py`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable, Mapping
from typing import Any

from torch.overrides import get_overridable_functions


def function_name(function: Any) -> str:
    """What `keep` calls a function of torch: "pow" for torch.pow, x.pow and x ** 2; nothing for one in place."""
    name: str = getattr(function, "__name__", "")
    return "" if name.endswith("_") and not name.startswith("__") else name.strip("_")


@functools.cache
def functions_by_name() -> dict[str, tuple[Any, ...]]:
    """All functions of torch that can be kept."""
    found: dict[str, dict[Any, None]] = {}
    for functions in get_overridable_functions().values():
        for function in functions:
            found.setdefault(function_name(function), {})[function] = None
    return {name: tuple(functions) for name, functions in found.items() if name}


def kept_calls(entries: Iterable[str]) -> Mapping[str, tuple[bool, ...]]:
    """{function: whether each of its calls is kept}, nothing for all of them: "linear 2 of 3" is the second alone."""
    found: dict[str, tuple[bool, ...]] = {}
    for entry in sorted(entries):  # a name by itself comes before those with numbers
        name, _, numbers = entry.partition(" ")
        number, _, of = numbers.partition(" of ")
        known = found.get(name, (False,) * int(of or 0))
        found[name] = tuple(kept or place == int(number) for place, kept in enumerate(known, 1))
    return found


def is_kept(calls: tuple[bool, ...], number: int) -> bool:
    """Whether a call is among these; so are those beyond all that there were when the plan was made."""
    return not calls or (number > 0 and (number > len(calls) or calls[number - 1]))


def positional_names(forward: Any) -> list[str]:
    """Names of the parameters that arguments are bound to by their place."""
    try:
        parameters = inspect.signature(forward).parameters.values()
    except (TypeError, ValueError):  # scripted modules have no signature
        return []
    return [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
