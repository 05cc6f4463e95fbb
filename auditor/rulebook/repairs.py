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


_OPERATORS = {ast.MatMult: "matmul", ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.Div: "div"}
"""{operator: its function in torch}."""
_SHAPING = ("view", "reshape", "flatten", "permute", "transpose", "t", "unsqueeze", "squeeze", "expand", "contiguous")
"""Methods whose results have their tensor's dtype."""
_WRITTEN = "values"
"""Schema name of the value that an assignment to `x[index]` writes."""


def repair_of_call(code: str | None, function: str, conversion: Conversion) -> str | None:
    """The call of `function` in a source line with arguments converted, as `f(x.to(y.dtype), y)`; None if the line does
    not show the call or the arguments, or if another call would have to run twice."""
    names = {*conversion.converted, conversion.target}
    has_target = conversion.target not in conversion.converted  # false if both tensors are in one list argument
    for node in expressions_in(code) if has_target and conversion.converted else ():
        arguments = _arguments_of(node, function, conversion.order)
        if names <= arguments.keys() and not _calls(arguments[conversion.target]):
            converted = [arguments[name] for name in conversion.converted]
            return _with(node, converted, f"{_closed_text(arguments[conversion.target])}.dtype")
    return None


def repair_of_module(code: str | None, attribute: str) -> str | None:
    """The call of a module, the attribute or item of `self` with this name, with its first argument converted to the
    weight's dtype; None if the line does not show the call."""
    for node in expressions_in(code):
        if isinstance(node, ast.Call) and node.args and _last_name(node.func) == attribute:
            return _with(node, [node.args[0]], f"{_closed_text(node.func)}.weight.dtype")
    return None


def plain_name(node: ast.expr | None) -> str | None:
    """The text of a tensor that has an expression's dtype, such as `x`, `self.x` or `x[0]`; None if no name shows it.

    Of a slice, of `x.view(...)` and of `2 * x` it is that of `x`.
    """
    node = _same_dtype(node)
    text = "" if node is None else ast.unparse(node)
    return text if re.fullmatch(r"[^\W\d][\w.]*(\[[\w., ]+\])?", text) else None


def _same_dtype(node: ast.expr | None) -> ast.expr | None:
    """The innermost part of an expression that is known to have the expression's dtype."""
    if isinstance(node, ast.Subscript) and any(isinstance(part, ast.Slice) for part in ast.walk(node.slice)):
        return _same_dtype(node.value)
    if isinstance(node, ast.BinOp) and isinstance(node.left, ast.Constant):
        return _same_dtype(node.right)
    if isinstance(node, ast.BinOp) and isinstance(node.right, ast.Constant):
        return _same_dtype(node.left)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _SHAPING:
        shaped = node.func.value
        if _is_library(shaped):  # torch.reshape(x, ...)
            shaped = node.args[0] if node.args else node
        return _same_dtype(shaped) if shaped is not node else node
    return node


def name_in_call(node: ast.AST, function: str, order: Sequence[str], argument: str, owner: str) -> str | None:
    """The plain name of a tensor that an operation reads, in the expression that calls the operation or its module.

    order: schema names of the operation's arguments; argument: which of them the tensor is. owner: the last name of the
    operation's module. A module's first argument is the operation's, and its weight is the module's.
    """
    direct = _arguments_of(node, function, order).get(argument)
    if direct is not None:
        return plain_name(direct)
    if not isinstance(node, ast.Call) or not owner or _last_name(node.func) != owner:
        return None
    if argument == "weight":
        return f"{_closed_text(node.func)}.weight"
    is_first = argument == order[0] and node.args
    return plain_name(node.args[0]) if is_first else None


def expressions_in(code: str | None) -> Iterator[ast.AST]:
    """Every expression and assignment of a line of code; none if the line is only a part of a statement."""
    for text in (code or "", f"{code} pass"):  # such as `if f(x):`
        try:
            yield from ast.walk(ast.parse(text))
        except (SyntaxError, ValueError):
            continue
        return


def calls_one_of(code: str | None, functions: Sequence[str]) -> bool:
    """Whether a line of code calls one of the functions, by their last names."""
    calls = (node for node in expressions_in(code) if isinstance(node, ast.Call))
    return any(_last_name(call.func) in functions for call in calls)


def _arguments_of(node: ast.AST, function: str, order: Sequence[str]) -> Mapping[str, ast.expr]:
    """{schema name: expression} of the tensor arguments, if the node calls `function`; otherwise empty.

    order: the schema names; `tensors[0]` is the first tensor of a list.
    """
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Subscript):
        return {"self": node.targets[0].value, _WRITTEN: node.value} if function == "index_put" else {}
    if isinstance(node, ast.BinOp):
        is_called = _OPERATORS.get(type(node.op)) == function
        return dict(zip(order, (node.left, node.right), strict=False)) if is_called else {}
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
    if any(name.endswith("]") for name in order):
        given = [item for value in given for item in _items(value)]
    return {**dict(zip(order, given, strict=False)), **named}


def _items(node: ast.expr) -> Sequence[ast.expr]:
    """The items of a list or tuple that is written out; otherwise the expression itself."""
    return node.elts if isinstance(node, ast.List | ast.Tuple) else [node]


def _calls(node: ast.expr) -> bool:
    """Whether an expression calls a function or a module, which a change must not call a second time."""
    calls = (part for part in ast.walk(node) if isinstance(part, ast.Call))
    return any(_same_dtype(call) is call for call in calls)


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
