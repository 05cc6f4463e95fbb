"""Where in the user's code an operation was called: the line that wrote it, and the `forward` around it."""

from __future__ import annotations

import linecache
import os
import sys
import sysconfig
from functools import cache
from pathlib import Path
from types import CodeType

import torch

_TORCH = f"{Path(torch.__file__).parent}{os.sep}"
_OURS = f"{Path(__file__).parents[1]}{os.sep}"
_INSTALLED = tuple(
    {sysconfig.get_paths()["purelib"], sysconfig.get_paths()["platlib"], sysconfig.get_paths()["stdlib"]}
)
_DEPTH = 200
"""Frames that are looked at, from the operation outwards."""

Place = tuple[str, int]
"""File and line."""


def place_of_call(outermost: CodeType) -> Place | None:
    """Innermost frame of the user's own code; of an installed library where there is none; never of torch itself.

    outermost: the function in whose frame the search ends, since what called it is not the model's code.
    """
    frame, library = sys._getframe(1), None
    for _ in range(_DEPTH):
        name = frame.f_code.co_filename
        kind = _kind(name)
        if kind == "own":
            return name, frame.f_lineno
        if kind == "library" and library is None:
            library = name, frame.f_lineno
        if frame.f_back is None or frame.f_code is outermost:
            break
        frame = frame.f_back
    return library


def code_at(place: Place) -> str | None:
    """The text of a line, None where its file cannot be read."""
    return linecache.getline(*place).strip() or None


@cache
def _kind(filename: str) -> str:
    if filename.startswith((_TORCH, _OURS, "<frozen")):
        return "torch"
    if filename.startswith("<"):
        return "none"
    return "library" if filename.startswith(_INSTALLED) else "own"
