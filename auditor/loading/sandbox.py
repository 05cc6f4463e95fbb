"""A fence around the user's code: what it may change is put back, and what it raises becomes one clear line."""

from __future__ import annotations

import random
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from ..capture.regions import written_as_meant
from ..errors import LoadError, first_line
from ..isolation import isolated
from ..isolation.process import ieee
from ..raised import origin_of
from .importer import as_script

T = TypeVar("T")


@contextmanager
def user_code(folders: tuple[str, ...], seed: int, script: str) -> Iterator[None]:
    """Runs the body as the user's script would run, see `as_script`, every generator seeded.

    `torch.autocast("cuda")` as a decorator keeps what it says, although there may be no CUDA here.
    Put back afterwards: bytecode writing, and what `isolated` restores, `sys.path` among it.
    """
    no_bytecode, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        with ieee(), isolated(seed=seed), written_as_meant(), as_script(script, folders):
            yield
    finally:
        sys.dont_write_bytecode = no_bytecode


def call(function: Callable[..., T], what: str, slug: str, *args: Any, **kwargs: Any) -> T:
    """`function(*args, **kwargs)`; what it raises becomes a LoadError that starts with `what`."""
    try:
        return function(*args, **kwargs)
    except LoadError:
        raise
    except (Exception, SystemExit) as error:
        raise LoadError(f"{what} raised {blame(error)}", slug=slug) from error


def blame(error: BaseException) -> str:
    """`TypeError: message (model.py:12)`, the place being the innermost line outside of Python and its packages.

    What a library raised from something else, as for a package that it cannot import, is followed by that.
    """
    first = origin_of(error)
    text = _said(error) if first is error else f"{_said(error).rstrip('.')}, from {_said(first)}"
    frames = [f for f in traceback.extract_tb(error.__traceback__) if _is_user_file(f.filename)]
    return f"{text} ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else text


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
