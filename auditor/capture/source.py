"""Locates the source line outside torch that ran an operation, and the user's call that reached the line."""

from __future__ import annotations

import inspect
import linecache
import os
import re
import sys
import sysconfig
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from traceback import walk_stack, walk_tb
from types import CodeType, FrameType
from typing import NamedTuple

import torch
from torch import nn

from ..records import Span
from .places import LIBRARIES

_TORCH = f"{Path(torch.__file__).parent}{os.sep}"
_OURS = f"{Path(__file__).parents[1]}{os.sep}"
_INSTALLED = tuple({f"{sysconfig.get_paths()[name]}{os.sep}" for name in ("purelib", "platlib")})
_STANDARD = f"{sysconfig.get_paths()['stdlib']}{os.sep}"
_GENERATED = "<eval_with_key>"
"""File name of the code that torch.fx generates."""
PATCHED = "patched_model.py"
"""Name of the generated file with a model's plans: its lines pass calls on to the user's code."""
_MODULE = nn.Module.__call__.__code__.co_filename
_PASSING_ON = frozenset({"__torch_function__", "__torch_dispatch__"})
"""Functions that only dispatch an operation that another source line called."""
_INLINE = re.compile(r"\.<locals>\.<(?:list|set|dict)comp>|\.<locals>\.<genexpr>")


class Place(NamedTuple):
    """The position of an expression; column: in characters from 1, None if Python does not record it."""

    file: str
    line: int
    column: int | None = None

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column or 1}"


@dataclass(frozen=True)
class SourceLine:
    """An operation's source line. caller: the user's call that reached the line; function: the caller's function.
    expressions: the user's expressions that were running, the innermost function's first."""

    place: Place
    caller: Place | None = None
    function: str = ""
    expressions: tuple[Span, ...] = ()


def written_at(outermost: CodeType) -> SourceLine | None:
    """The innermost line outside torch in the call stack, and a call that reached this line; None if all code is
    torch's.

    For a line of a library, the call is the user's line that called the library. For another line outside a `forward`,
    the call is a caller's line in a `forward`; without one, in the outermost function. Other source lines have no call.

    outermost: the function whose frame ends the search, since its callers are not the model's code.
    """
    frames: list[FrameType] = []
    for frame, _ in walk_stack(sys._getframe(1)):
        if kind_of(frame.f_code.co_filename):
            frames.append(frame)
        if frame.f_code is outermost:
            break
    if not frames:
        return None
    first, *others = [frame for frame in frames if frame.f_code.co_name not in _PASSING_ON] or frames
    place, beside = _place(first), None
    if kind_of(first.f_code.co_filename) == "library":
        beside = next((frame for frame in others if kind_of(frame.f_code.co_filename) == "own"), None)
    if beside is None and not _is_forward(first):
        beside = next((frame for frame in others if _is_forward(frame)), others[-1] if others else None)
    own = [frame for frame in frames if kind_of(frame.f_code.co_filename) == "own"]
    spans = [span_of(frame.f_code, frame.f_lasti) for frame in own]
    expressions = tuple(span for span in spans if span is not None)
    if beside is None or _place(beside)[:2] == place[:2]:
        return SourceLine(place, expressions=expressions)
    return SourceLine(place, _place(beside), _function(beside.f_code), expressions)


def line_of(place: Place) -> str:
    """A position as the report shows it: `file.py:line`."""
    return f"{Path(place.file).name}:{place.line}"


def raised_at(error: BaseException) -> str:
    """The innermost line outside torch where a module call raised; "" for other errors."""
    inside, place = False, ""
    for frame, line in walk_tb(error.__traceback__):
        filename = frame.f_code.co_filename
        inside = inside or filename == _MODULE
        if inside and kind_of(filename):
            place = line_of(Place(filename, line))
    return place


@cache
def span_of(code: CodeType, instruction: int) -> Span | None:
    """The expression that an instruction of a function belongs to, by its offset; None if Python does not record it."""
    line, end_line, column, end_column = next(islice(code.co_positions(), instruction // 2, None))
    if line is None or end_line is None or column is None or end_column is None:
        return None
    return Span(code.co_filename, line, column, end_line, end_column)


def is_installed(path: str) -> bool:
    """Whether a file belongs to an installed package."""
    return path.startswith(_INSTALLED) or not LIBRARIES.isdisjoint(Path(path).parts)


def _is_forward(frame: FrameType) -> bool:
    """Whether a stack frame runs a module's forward: a function called `forward` (but not an autograd.Function's), or a
    function that replaces it."""
    if _function(frame.f_code).rpartition(".")[2] == "forward":
        return not _is_of_autograd(frame.f_code)
    return frame.f_back is not None and frame.f_back.f_code.co_filename == _MODULE


@cache
def _is_of_autograd(code: CodeType) -> bool:
    """Whether this is the forward of an autograd.Function. Its caller does not show that: torch 2.14 calls it from C++."""
    kinds = [torch.autograd.Function]
    while kinds:
        kind = kinds.pop()
        kinds += kind.__subclasses__()
        own = vars(kind).get("forward")
        function = inspect.unwrap(getattr(own, "__func__", own)) if own is not None else None
        if getattr(function, "__code__", None) is code:
            return True
    return False


def _place(frame: FrameType) -> Place:
    """The position of the expression that a frame runs."""
    code = frame.f_code
    file = code.co_filename
    line = frame.f_lineno
    instruction = frame.f_lasti // 2
    _, _, column, _ = next(islice(code.co_positions(), instruction, None))  # the column is in bytes
    if column is None:
        return Place(file, line, None)
    before = linecache.getline(file, line).encode()[:column].decode(errors="ignore")
    return Place(file, line, len(before) + 1)


@cache
def _function(code: CodeType) -> str:
    """A function's display name: a comprehension belongs to the function around it."""
    return _INLINE.sub("", code.co_qualname).rpartition("<locals>.")[2]


@cache
def kind_of(filename: str) -> str:
    """own: user code; library: an installed package; "": torch, this package, the standard library, a patched model's
    file, or no file."""
    if filename.startswith((_TORCH, _OURS)) or Path(filename).name == PATCHED:
        return ""
    if filename.startswith("<"):  # a cell of a notebook has lines
        return "own" if not filename.startswith(_GENERATED) and linecache.getlines(filename) else ""
    if is_installed(filename):
        return "library"
    return "" if filename.startswith(_STANDARD) else "own"
