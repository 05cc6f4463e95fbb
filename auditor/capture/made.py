"""Names a tensor that no recorded operation made, and the source line where the user's code made it."""

from __future__ import annotations

import ast
import inspect
import linecache
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from traceback import walk_stack
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ..isolation.members import OWN
from ..records import Made
from .source import Place, kind_of, line_of


def made_of(x: torch.Tensor, outermost: CodeType) -> Made | None:
    """Where the user's code made a tensor that it reads now: the tensor's name there, and the line that assigned this
    name. Without a name: the line that reads the tensor, which usually makes it too. None if all running code is
    torch's.

    outermost: the function whose frame ends the search.
    """
    frames = list[FrameType]()
    for frame, _ in walk_stack(None):
        if frame.f_code is outermost:
            break
        if kind_of(frame.f_code.co_filename):
            frames.append(frame)
    for find in (_attribute, _local, _global):
        for frame in frames:
            if (place := find(frame, x)) is not None:
                return place
    return Made("", line_of(Place(frames[0].f_code.co_filename, frames[0].f_lineno))) if frames else None


def _local(frame: FrameType, x: torch.Tensor) -> Made | None:
    """The Made of a local variable whose value is `x`."""
    for name, value in frame.f_locals.items():
        if value is x and name.isidentifier():
            file, function = frame.f_code.co_filename, frame.f_code.co_firstlineno
            lines = [line for line in _assigned(file, function, name) if line < frame.f_lineno]
            return Made(name, line_of(Place(file, max(lines, default=frame.f_lineno))))
    return None


def _attribute(frame: FrameType, x: torch.Tensor) -> Made | None:
    """The Made of a plain attribute, with the value `x`, of a module among the local variables."""
    for module in (value for value in frame.f_locals.values() if isinstance(value, nn.Module)):
        for name, value in vars(module).items():
            if name not in OWN and any(leaf is x for leaf in pytree.tree_leaves(value)):
                kind = "attribute" if isinstance(value, torch.Tensor) else "container"
                return Made(name, _where_set(type(module), name), kind)
    return None


def _global(frame: FrameType, x: torch.Tensor) -> Made | None:
    """The Made of a global variable whose value is `x`."""
    for name, value in frame.f_globals.items():
        if value is x:
            lines = _assigned_in(_parsed(frame.f_code.co_filename), name)
            return Made(name, line_of(Place(frame.f_code.co_filename, lines[0])) if lines else None, "global")
    return None


def _where_set(kind: type, name: str) -> str | None:
    """The line of a class, or of a class above it, that assigns an attribute of this name; None if unknown."""
    for each in kind.__mro__:
        with suppress(OSError, TypeError):  # a class without a file
            file, (text, first) = inspect.getsourcefile(each) or "", inspect.getsourcelines(each)
            last = first + len(text)
            lines = [line for line in _attributes(file).get(name, ()) if first <= line < last]
            if lines:
                return line_of(Place(file, lines[0]))
    return None


@cache
def _parsed(file: str) -> ast.Module:
    """The syntax tree of a file; an empty one if the file has no valid source text."""
    try:
        return ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return ast.Module([], [])


@cache
def _assigned(file: str, function: int, name: str) -> tuple[int, ...]:
    """The lines of a function that assign a variable. function: its first line, or its first decorator's."""
    for node in ast.walk(_parsed(file)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            starts = {node.lineno, *(each.lineno for each in node.decorator_list)}
            if function in starts:
                return _assigned_in(node, name)
    return ()


def _assigned_in(part: ast.AST, name: str) -> tuple[int, ...]:
    """The lines of a part of a file that assign a variable."""
    named = (each for each in ast.walk(part) if isinstance(each, ast.Name) and each.id == name)
    return tuple(each.lineno for each in named if isinstance(each.ctx, ast.Store))


@cache
def _attributes(file: str) -> dict[str, tuple[int, ...]]:
    """{name of an attribute: the lines of a file that assign it}."""
    result = dict[str, tuple[int, ...]]()
    for node in ast.walk(_parsed(file)):
        for target in _targets(node):
            if isinstance(target, ast.Attribute):
                result[target.attr] = (*result.get(target.attr, ()), target.lineno)
    return result


def _targets(node: Any) -> Iterator[ast.expr]:
    """The targets of an assignment."""
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    for target in targets:
        if isinstance(target, ast.Tuple | ast.List):
            yield from target.elts
        elif isinstance(target, ast.expr):
            yield target
