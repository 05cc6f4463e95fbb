"""Finds names of tensors that a changed line of the user's function can refer to."""

from __future__ import annotations

import ast
import linecache
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

from ..records.graph import Span

Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


class Line(NamedTuple):
    """A line of the user's code. file: its path, or only its name."""

    file: str
    number: int


def line_at(source: str | None) -> Line | None:
    """The line that `file:line` names; None without one."""
    file, _, number = (source or "").rpartition(":")
    return Line(file, int(number)) if file and number.isdigit() else None


def expression_at(span: Span) -> ast.expr | None:
    """The expression whose text a span is; None if the file has no such expression."""
    return _expressions(span.file).get(span[1:])


@cache
def _expressions(file: str) -> Mapping[tuple[int | None, ...], ast.expr]:
    """{place, as in Span: the outermost expression there} of a file."""
    result = dict[tuple[int | None, ...], ast.expr]()
    for node in ast.walk(_tree(file)):
        if isinstance(node, ast.expr):
            place = (node.lineno, node.col_offset, node.end_lineno, node.end_col_offset)
            result.setdefault(place, node)
    return result


def refers_to(text: str, span: Span, line: Line) -> bool:
    """Whether a name that an expression reads also exists in a line before it of the same function.

    text: the name, such as `x` or `self.x`. span: the expression that reads it.
    """
    if Path(span.file).name != Path(line.file).name:
        return False
    function = _function_around(span.file, span.line)
    if function is None or function is not _function_around(span.file, line.number):
        return False
    root = text.partition(".")[0].partition("[")[0]
    return root in _names_before(function, line.number)


def _names_before(function: Function, line: int) -> set[str]:
    """The function's arguments, and the variables that it sets before a line."""
    given = function.args
    arguments = [*given.posonlyargs, *given.args, *given.kwonlyargs]
    stored = (node for node in ast.walk(function) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))
    return {argument.arg for argument in arguments} | {node.id for node in stored if node.lineno < line}


@cache
def _function_around(file: str, line: int) -> Function | None:
    """The innermost function of a file that contains a line."""
    around = list[Function](_functions_around(_tree(file), line))
    return max(around, key=lambda function: function.lineno, default=None)


def _functions_around(tree: ast.AST, line: int) -> Iterator[Function]:
    for node in ast.walk(tree):
        if isinstance(node, Function) and node.lineno <= line <= (node.end_lineno or node.lineno):
            yield node


@cache
def _tree(file: str) -> ast.Module:
    try:
        return ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return ast.Module(body=[], type_ignores=[])
