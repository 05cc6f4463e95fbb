"""Writes the change of one source line that converts an argument of a call to the dtype of another argument."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Conversion:
    """Which arguments of an operation to convert to the dtype of which other argument, by their schema names.

    order: the names of the operation's arguments, in order; a method's first is its object.
    """

    converted: tuple[str, ...]
    target: str
    order: tuple[str, ...]


_WRITTEN = "values"
"""Schema name of the value that an assignment to `x[index]` writes."""


def repair_of_call(code: str | None, function: str, conversion: Conversion) -> str | None:
    """The call of `function` in a source line with arguments converted, as `f(x.to(y.dtype), y)`; None if the line does
    not show the call or the arguments."""
    names = {*conversion.converted, conversion.target}
    has_target = conversion.target not in conversion.converted  # false if both tensors are in one list argument
    for node in _expressions(code) if has_target and conversion.converted else ():
        arguments = _arguments_of(node, function, conversion)
        if names <= arguments.keys():
            converted = [arguments[name] for name in conversion.converted]
            return _with(node, converted, f"{_closed_text(arguments[conversion.target])}.dtype")
    return None


def repair_of_module(code: str | None, attribute: str) -> str | None:
    """The call of a module, the attribute or item of `self` with this name, with its first argument converted to the
    weight's dtype; None if the line does not show the call."""
    for node in _expressions(code):
        if isinstance(node, ast.Call) and node.args and _last_name(node.func) == attribute:
            return _with(node, [node.args[0]], f"{_closed_text(node.func)}.weight.dtype")
    return None


def argument_text(code: str | None, function: str, conversion: Conversion, name: str) -> str | None:
    """The text of one argument in the call of `function`, if it is a plain name such as `x` or `self.x`."""
    for node in _expressions(code):
        argument = _arguments_of(node, function, conversion).get(name)
        if argument is not None and re.fullmatch(r"[\w.]+", text := ast.unparse(argument)):
            return text
    return None


def _expressions(code: str | None) -> Iterator[ast.AST]:
    """Every expression and assignment of a line of code; none if the line is only a part of a statement."""
    for text in (code or "", f"{code} pass"):  # such as `if f(x):`
        try:
            yield from ast.walk(ast.parse(text))
        except (SyntaxError, ValueError):
            continue
        return


def _arguments_of(node: ast.AST, function: str, conversion: Conversion) -> Mapping[str, ast.expr]:
    """{schema name: expression} of the tensor arguments, if the node calls `function`; otherwise empty."""
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Subscript):
        return {"self": node.targets[0].value, _WRITTEN: node.value} if function == "index_put" else {}
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
        return dict(zip(conversion.order, (node.left, node.right), strict=False)) if function == "matmul" else {}
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute | ast.Name):
        return {}
    if _last_name(node.func).rstrip("_") not in (
        function,
        function.removesuffix("r"),
    ):  # F.grid_sample runs grid_sampler
        return {}
    is_method = isinstance(node.func, ast.Attribute) and not _is_library(node.func.value)
    given = [node.func.value, *node.args] if is_method and isinstance(node.func, ast.Attribute) else node.args
    named = {keyword.arg: keyword.value for keyword in node.keywords if keyword.arg}
    return {**dict(zip(conversion.order, given, strict=False)), **named}


def _is_library(node: ast.expr) -> bool:
    return ast.unparse(node) in ("torch", "F", "functional", "nn.functional", "torch.nn.functional", "torch.linalg")


def _last_name(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _with(node: ast.AST, converted: Sequence[ast.expr], dtype: str) -> str:
    """The text of a call in which some arguments are converted to a dtype."""
    replaced = {id(argument): ast.parse(_converted(argument, dtype), mode="eval").body for argument in converted}
    return ast.unparse(_Replacing(replaced).visit(node))


def _converted(argument: ast.expr, dtype: str) -> str:
    text = ast.unparse(argument)
    if isinstance(argument, ast.Call) and _last_name(argument.func) == "to" and len(argument.args) == 1:
        return f"{text[:-1]}, {dtype})"  # `x.to(y.device)` takes a dtype too
    return f"{_closed_text(argument)}.to({dtype})"


def _closed_text(expression: ast.expr) -> str:
    """The text of an expression to which an attribute can be appended: in parentheses if need be."""
    text = ast.unparse(expression)
    is_closed = isinstance(expression, ast.Name | ast.Attribute | ast.Call | ast.Subscript)
    return text if is_closed else f"({text})"


class _Replacing(ast.NodeTransformer):
    """Replaces expressions. replaced: {id of an expression: the new expression}."""

    def __init__(self, replaced: Mapping[int, ast.expr]) -> None:
        self._replaced = replaced

    def visit(self, node: ast.AST) -> Any:
        """The new expression in place of a replaced one; other nodes with their parts visited."""
        return self._replaced.get(id(node)) or super().visit(node)
