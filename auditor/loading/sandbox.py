"""Functions of the user's called: what they need, and what they raise, in one clear line."""

from __future__ import annotations

import inspect
import random
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from ..errors import LoadError, first_line, origin_of

T = TypeVar("T")


def call(function: Callable[..., T], what: str, slug: str, *args: Any, **kwargs: Any) -> T:
    """`function(*args, **kwargs)`; what it raises becomes a LoadError that starts with `what`."""
    try:
        return function(*args, **kwargs)
    except LoadError:
        raise
    except (Exception, SystemExit) as error:
        raise LoadError(f"{what} raised {blame(error)}", slug=slug) from error


def required(function: Callable[..., Any]) -> list[str]:
    """The arguments that it cannot do without."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in parameters if p.default is p.empty and p.kind not in variadic]


def blame(error: BaseException) -> str:
    """`TypeError: message (model.py:12)`, the place being the innermost line outside of Python and its packages.

    What was raised from something else, as by a library for a package that it cannot import, is followed by that.
    """
    first = origin_of(error)
    text = _said(error) if first is error else f"{_said(error).rstrip('.')}, from {_said(first)}"
    frames = [*traceback.extract_tb(error.__traceback__), *traceback.extract_tb(first.__traceback__)]
    places = [f"{Path(f.filename).name}:{f.lineno}" for f in frames if _is_user_file(f.filename)]
    return f"{text} ({places[-1]})" if places else text


def _said(error: BaseException) -> str:
    name, line = type(error).__name__, first_line(error).strip()
    return name if line == name else f"{name}: {line}"


def _is_user_file(filename: str) -> bool:
    if filename.startswith("<"):
        return False
    file = Path(filename).resolve()
    ours = Path(__file__).resolve().parents[1]
    library = Path(random.__file__).resolve().parent
    return ours not in file.parents and library not in file.parents and "site-packages" not in file.parts
