"""Describes mixed dtypes that make an operation raise: where, which operation made the FP32 values, and how to fix it."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import fx

from ..capture.paths import reach
from ..execution.mixtures import Mixture
from ..numerics.nodes import arguments, dtype, row_of, written_argument
from ..records import Capture, Node, Placeholder
from .names import Line, expression_at, line_at, refers_to
from .repairs import Conversion, calls_one_of, expressions_in, name_in_call, repair_of_call, repair_of_module

MOST = 2
"""Maximum number of origins that a text names."""
MOST_LINES = 6
"""Maximum number of lines of further origins that a text names."""
UNNAMED = "x.dtype"
"""Stands for the dtype in a fix if no tensor of the changed line's function is known to have it."""
_WANTED = (torch.float32, torch.float16, torch.bfloat16)
"""Dtypes in the FP32 model of values that a cast to FP32 keeps from being low-precision."""
_POSITIONS = ("arange", "cumsum")
"""Operations that make positions."""
_MAKING = ("tensor", "as_tensor")
"""Functions that make a tensor of Python's or NumPy's numbers: a copy and a cast in the recorded graph."""
_ADDING = ("index_add", "scatter_add", "scatter_reduce", "index_put", "_index_put_impl")
"""Operations that add terms to entries of their first argument, which an index names."""
_WHERE_MADE = ("`.to(", "`dtype=", "`self.register_buffer")
"""How a fix begins that changes the lines that make the FP32 values."""


def changes_where_made(fix: str) -> bool:
    """Whether the fix of an operation with two dtypes (`Describer.fix`) makes the FP32 values in low precision from the
    start; otherwise it converts arguments in the operation's line."""
    return fix.startswith(_WHERE_MADE)


def writes_into_fp32(node: fx.Node, mixture: Mixture) -> bool:
    """Whether an operation with two dtypes writes low-precision values into an FP32 tensor."""
    conversion = _conversion(node, mixture)
    target = node.args[0] if node.args else None
    return conversion.target == "self" and isinstance(target, fx.Node) and target.name in mixture.wide


class Describer:
    """Describes in words the mixed dtypes (`Mixture`) with which operations of one recorded graph raise."""

    def __init__(self, capture: Capture) -> None:
        self._capture = capture
        self._graph = {node.name: node for node in capture.graph_module.graph.nodes}
        self._places = {place.name: place for place in capture.placeholders}

    def origins(self, mixtures: Sequence[Mixture]) -> str:
        """The operations, inputs and tensors that are FP32, each with the line where it was made."""
        names = dict.fromkeys(name for mixture in mixtures for name in mixture.origins)
        lines = dict[str, dict[str, None]]()  # {the origin in words: the lines that made it}
        for name in names:
            lines.setdefault(self._origin(name), {})[self._line(name)] = None
        texts = list(lines)
        if len(texts) <= MOST:
            return " and ".join(texts)
        further = dict.fromkeys(line for text in texts[MOST:] for line in lines[text] if line)
        named = f" ({', '.join([*further][:MOST_LINES])})" if further else ""
        return f"{', '.join(texts[:MOST])} and {len(texts) - MOST} more{named}"

    def _line(self, name: str) -> str:
        """The line that made an FP32 value; "" if unknown."""
        if name in self._capture.nodes:
            return self._capture.nodes[name].source or ""
        made = self._places[name].made
        return (made.source or "") if made is not None else ""

    def _origin(self, name: str) -> str:
        if name in self._capture.nodes:
            node = self._capture.nodes[name]
            kind = f"`{row_of(self._graph[name]).name}`"
            if row_of(self._graph[name]).cast:
                kind = "`tensor`" if calls_one_of(node.code, _MAKING) else "the cast to FP32"
            return f"{kind}{in_line(node.source)}"
        place = self._places[name]
        if place.kind != "constant" or place.made is None:
            return f"the {place.kind} `{place.fqn or place.argument or name}`"
        if place.made.kind in ("attribute", "container"):
            return f"the attribute `{place.made.name}`{in_line(place.made.source)}, which is no buffer"
        return (
            f"`{place.made.name}`{in_line(place.made.source)}"
            if place.made.name
            else f"the tensor made{_at(place.made.source)}"
        )

    def fix(self, name: str, mixtures: Sequence[Mixture]) -> str:
        """The change of the source after which all arguments of an operation have one dtype.

        It changes the lines that made the FP32 values, or the line of the operation: if the model needs these values in
        FP32, or if nothing in those lines has the dtype to convert to.
        mixtures: one for each strategy under which the operation raises.
        """
        mixture = mixtures[0]
        origins = dict.fromkeys(origin for each in mixtures for origin in each.origins)
        node, graph_node = self._capture.nodes[name], self._graph[name]
        conversion = _conversion(graph_node, mixture)
        function = row_of(graph_node).name.lstrip("_")
        at = _at(node.source)
        own = repair_of_call(node.code, function, conversion)
        called = None
        if conversion.converted == conversion.order[:1] and self._has_weight(node, graph_node):
            called = repair_of_module(node.code, node.owner.rpartition(".")[2])
        text = own or called
        meetings = [*mixture.meetings, *((name, low) for low in mixture.low)]
        changes = self._changes(node, origins, meetings)
        where_made = _joined(changes)
        is_clear = all(change.is_clear for change in changes or ())
        # A total of many terms stays in FP32 where another operation reads it.
        reads_total = any(self._is_added_to(each) and graph_node.args[0] is not self._graph[each] for each in origins)
        is_better_here = reads_total or (not is_clear and _is_own(node))
        if where_made is not None and (text is None or not is_better_here):
            return where_made if is_clear else f"{where_made}, where `x` is a tensor in low precision"
        if text is not None:
            return f"`{text}`{at}"
        if "weight" in (*conversion.converted, conversion.target):
            return f"convert the input with `.to(weight.dtype)`{at}"
        named = " and ".join(f"`{argument}`" for argument in conversion.converted)
        return f"convert {named} with `.to(x.dtype)`{at}, where `x` is the other tensor"

    def _changes(
        self, reader: Node, origins: Iterable[str], meetings: Sequence[tuple[str, str]]
    ) -> list[_Change] | None:
        """The changes of the lines that made the FP32 values; None if the model needs some of these values in FP32.

        meetings: (operation, its low-precision input), where low-precision tensors meet the FP32 values.
        """
        changes = [self._change(origin, reader, meetings) for origin in origins]
        known = [change for change in changes if change is not None]
        return known if len(known) == len(changes) else None

    def _change(self, origin: str, reader: Node, meetings: Sequence[tuple[str, str]]) -> _Change | None:
        """The change of the line that made an FP32 value; None if the value is wanted in FP32."""
        if origin in self._places:
            return self._change_of_constant(self._places[origin], meetings)
        node, graph_node = self._capture.nodes[origin], self._graph[origin]
        is_cast, read = row_of(graph_node).cast, graph_node.all_input_nodes
        if (read and not is_cast) or any(dtype(source) in _WANTED for source in read):
            return None  # computed, or converted from a low-precision value on purpose
        if any(row_of(each).name in _POSITIONS for each in reach(read, lambda each: each.all_input_nodes)):
            return None  # positions may be too large for low precision
        if self._becomes_a_phase(graph_node, self._graph[reader.name]):
            return None  # angles lose whole turns in low precision
        dtype_text = self._dtype_near(node.source, meetings)
        text = f"`dtype={dtype_text or UNNAMED}`"
        if is_cast and not calls_one_of(node.code, _MAKING):
            text = f"`.to({dtype_text or UNNAMED})` instead of the cast to FP32"
        return _Change(text, node.source, is_clear=dtype_text is not None)

    def _change_of_constant(self, place: Placeholder, meetings: Sequence[tuple[str, str]]) -> _Change | None:
        """The change of the line that made a tensor outside of the recorded operations."""
        made = place.made
        if place.kind != "constant" or made is None or made.kind == "global":
            return None
        if made.kind == "attribute":
            return _Change(f'`self.register_buffer("{made.name}", ...)`, which model.half() converts,', made.source)
        if made.kind == "container":
            call = f"`self.register_buffer` for each tensor of `{made.name}`"
            return _Change(f"{call}, which model.half() converts,", made.source)
        dtype_text = self._dtype_near(made.source, meetings)
        return _Change(f"`.to({dtype_text or UNNAMED})`", made.source, is_clear=dtype_text is not None)

    def _dtype_near(self, source: str | None, meetings: Sequence[tuple[str, str]]) -> str | None:
        """The text of the low-precision dtype, such as `y.dtype`, by a tensor that a source line can refer to; None if
        none is known."""
        line = line_at(source)
        if line is None:
            return None
        for operation, low in meetings:
            text = self._name_near(line, operation, low)
            if text is not None:
                return f"{text}.dtype"
        return None

    def _name_near(self, line: Line, operation: str, low: str) -> str | None:
        """The name of an operation's low-precision input, if the line is in the same function, after the name is set."""
        node, graph_node = self._capture.nodes[operation], self._graph[operation]
        given = _flat(arguments(graph_node))
        argument = _first_with(given, (low,))
        function = row_of(graph_node).name.lstrip("_")
        for span in node.expressions:
            expression = expression_at(span)
            in_line = list(expressions_in(node.code)) if span is node.expressions[0] else []
            candidates: list[ast.AST] = in_line  # which may have other calls of the same function
            if expression is not None:
                assignments = [each for each in in_line if isinstance(each, ast.Assign)]  # such as `result[rows] = y`
                candidates = [expression, *assignments]
            owner = node.owner.rpartition(".")[2]
            if argument == "weight" and not self._has_weight(node, graph_node):
                owner = ""  # such as an attention, whose weight has another name
            for each in candidates:
                text = name_in_call(each, function, tuple(given), argument, owner)
                if text is not None and refers_to(text, span, line):
                    return text
        return None

    def _has_weight(self, node: Node, graph_node: fx.Node) -> bool:
        """Whether the operation's weight is the attribute `weight` of its module."""
        weight = arguments(graph_node).get("weight")
        if not node.owner or not isinstance(weight, fx.Node) or weight.name not in self._places:
            return False
        place = self._places[weight.name]
        name = (place.fqn or "").rpartition(".")[2]
        return name == "weight" and node.owner in place.holders

    def _is_added_to(self, origin: str) -> bool:
        """Whether an indexed addition, such as index_add, adds terms to the tensor."""
        made = self._graph[origin]
        return any(row_of(user).packet in _ADDING and user.args[0] is made for user in made.users)

    def _becomes_a_phase(self, origin: fx.Node, reader: fx.Node) -> bool:
        """Whether a sine or cosine lies between the FP32 values and the operation that raises."""
        before = set(reach([reader], lambda each: each.all_input_nodes))
        after = reach([origin], lambda each: [user for user in each.users if user in before])
        return any(row_of(each).wave for each in after)


def _is_own(node: Node) -> bool:
    """Whether the operation's source line is the user's, not a library's."""
    line = line_at(node.source)
    if line is None or not node.expressions:
        return True
    span = node.expressions[0]
    return Path(span.file).name == line.file and span.line <= line.number <= span.end_line


class _Change(NamedTuple):
    """A change of a line that makes an FP32 value. text: in words. is_clear: false if it needs the name of a tensor, and
    none is known."""

    text: str
    source: str | None
    is_clear: bool = True


def _joined(changes: Sequence[_Change] | None) -> str | None:
    """The changes with their lines, as text; None for too many to name."""
    lines = dict[str, dict[str, None]]()  # {change: the lines that it changes}
    for change in changes or ():
        lines.setdefault(change.text, {})[change.source or "the line that makes it"] = None
    is_many = len(lines) > MOST or any(len(each) > MOST for each in lines.values())
    if not lines or is_many:
        return None
    return " and ".join(f"{change} at {' and '.join(each)}" for change, each in lines.items())


def _conversion(node: fx.Node, mixture: Mixture) -> Conversion:
    """The conversion that gives an operation one dtype: of values to the tensor that they are written into, otherwise
    of the FP32 argument to low precision."""
    given = _flat(arguments(node))
    written = written_argument(node)
    if written is not None:
        return Conversion((written,), "self", tuple(given))
    wide = tuple(name for name, value in given.items() if {x.name for x in _tensors(value)} & {*mixture.wide})
    return Conversion(wide, _first_with(given, mixture.low), tuple(given))


def _flat(given: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments by name, with each item of a list as an argument of its own: `tensors[0]`."""
    result = dict[str, Any]()
    for name, value in given.items():
        if isinstance(value, list | tuple) and any(isinstance(item, fx.Node) for item in value):
            result.update({f"{name}[{i}]": item for i, item in enumerate(value)})
        else:
            result[name] = value
    return result


def _first_with(given: Mapping[str, Any], names: Sequence[str]) -> str:
    """The first argument that contains one of the named nodes."""
    return next((name for name, value in given.items() if {x.name for x in _tensors(value)} & {*names}), "")


def _tensors(value: Any) -> list[fx.Node]:
    result = list[fx.Node]()
    fx.node.map_arg(value, result.append)
    return result


def in_line(source: str | None) -> str:
    return f" ({source})" if source else ""


def _at(source: str | None) -> str:
    return f" at {source}" if source else ""
