"""Describes mixed dtypes that make an operation raise: where, which operation made the FP32 values, and how to fix it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from ..capture.paths import reach
from ..execution.mixtures import Mixture
from ..numerics.nodes import arguments, dtype, row_of
from ..records import Capture, Node, Placeholder
from .repairs import Conversion, argument_text, repair_of_call, repair_of_module

MOST = 2
"""Maximum number of origins that a text names."""
_WANTED = (torch.float32, torch.float16, torch.bfloat16)
"""Dtypes in the FP32 model of values that a cast to FP32 keeps from being low-precision."""
_POSITIONS = ("arange", "cumsum")
"""Operations that make positions."""
_ADDING = ("index_add", "scatter_add", "scatter_reduce", "index_put", "_index_put_impl")
"""Operations that add terms to entries of their first argument, which an index names."""
_WRITTEN = ("source", "values", "src")
"""Names of arguments whose values an operation writes into its argument `self`."""


class Describer:
    """Describes in words the mixed dtypes (`Mixture`) with which operations of one recorded graph raise."""

    def __init__(self, capture: Capture) -> None:
        self._capture = capture
        self._graph = {node.name: node for node in capture.graph_module.graph.nodes}
        self._places = {place.name: place for place in capture.placeholders}

    def origins(self, mixtures: Sequence[Mixture]) -> str:
        """The operations, inputs and tensors that are FP32, each with the line where it was made."""
        texts = list(dict.fromkeys(self._origin(name) for mixture in mixtures for name in mixture.origins))
        left_out = len(texts) - MOST
        if left_out > 0:
            return f"{', '.join(texts[:MOST])} and {left_out} more"
        return " and ".join(texts)

    def _origin(self, name: str) -> str:
        if name in self._capture.nodes:
            node = self._capture.nodes[name]
            kind = "the cast to FP32" if row_of(self._graph[name]).cast else f"`{row_of(self._graph[name]).name}`"
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

        mixtures: one for each strategy under which the operation raises.
        """
        mixture = mixtures[0]
        origins = dict.fromkeys(origin for each in mixtures for origin in each.origins)
        node, graph_node = self._capture.nodes[name], self._graph[name]
        conversion = _conversion(graph_node, mixture)
        function = row_of(graph_node).name.lstrip("_")
        beside = argument_text(node.code, function, conversion, _first_with(arguments(graph_node), mixture.low))
        at = _at(node.source)
        own = repair_of_call(node.code, function, conversion)
        called = repair_of_module(node.code, node.owner.rpartition(".")[2]) if node.owner else None
        text = own or called
        # A total of many terms stays in FP32, if the line shows where to convert.
        adds_up = beside is None and text is not None and any(map(self._is_added_to, origins))
        where_made = self._fix_of_origin(node, origins, beside or "x")
        if where_made is not None and not adds_up:
            return where_made
        if text is not None:
            return f"`{text}`{at}"
        if "weight" in (*conversion.converted, conversion.target):
            return f"convert the input with `.to(weight.dtype)`{at}"
        named = " and ".join(f"`{argument}`" for argument in conversion.converted)
        return f"convert {named} with `.to(x.dtype)`{at}, where `x` is the other tensor"

    def _fix_of_origin(self, reader: Node, origins: Iterable[str], beside: str) -> str | None:
        """The change of the lines that made the FP32 values; None if the model needs some of these values in FP32.

        beside: source text of an argument of `reader` in low precision.
        """
        lines = dict[str, dict[str, None]]()  # {change: the lines that it changes}
        for origin in origins:
            change = self._change(origin, reader, beside)
            if change is None:
                return None
            lines.setdefault(change[0], {})[change[1] or "the line that makes it"] = None
        many = len(lines) > MOST or any(len(each) > MOST for each in lines.values())
        return None if many else " and ".join(f"{change} at {' and '.join(each)}" for change, each in lines.items())

    def _change(self, origin: str, reader: Node, beside: str) -> tuple[str, str | None] | None:
        """The change of the line that made an FP32 value, and this line; None if the value is wanted in FP32."""
        if origin in self._places:
            return _change_of_constant(self._places[origin])
        node, graph_node = self._capture.nodes[origin], self._graph[origin]
        is_cast, read = row_of(graph_node).cast, graph_node.all_input_nodes
        if (read and not is_cast) or any(dtype(source) in _WANTED for source in read):
            return None  # computed, or converted from a low-precision value on purpose
        if any(row_of(each).name in _POSITIONS for each in reach(read, lambda each: each.all_input_nodes)):
            return None  # positions may be too large for low precision
        if self._becomes_a_phase(graph_node, self._graph[reader.name]):
            return None  # angles lose whole turns in low precision
        tensor = beside if node.owner == reader.owner and node.source_path == reader.source_path else "x"
        if is_cast:
            return f"`.to({tensor}.dtype)` instead of the cast to FP32", node.source
        return f"`dtype={tensor}.dtype`", node.source

    def _is_added_to(self, origin: str) -> bool:
        """Whether an indexed addition, such as index_add, adds terms to the tensor."""
        made = self._graph[origin]
        return any(row_of(user).packet in _ADDING and user.args[0] is made for user in made.users)

    def _becomes_a_phase(self, origin: fx.Node, reader: fx.Node) -> bool:
        """Whether a sine or cosine lies between the FP32 values and the operation that raises."""
        before = set(reach([reader], lambda each: each.all_input_nodes))
        after = reach([origin], lambda each: [user for user in each.users if user in before])
        return any(row_of(each).wave for each in after)


def _change_of_constant(place: Placeholder) -> tuple[str, str | None] | None:
    made = place.made
    if place.kind != "constant" or made is None or made.kind == "global":
        return None
    if made.kind == "attribute":
        return f'`self.register_buffer("{made.name}", ...)`, which model.half() converts,', made.source
    if made.kind == "container":
        return f"`self.register_buffer` for each tensor of `{made.name}`, which model.half() converts,", made.source
    return "`.to(x.dtype)`", made.source


def _conversion(node: fx.Node, mixture: Mixture) -> Conversion:
    """The conversion that gives an operation one dtype: of values to the tensor that they are written into, otherwise
    of the FP32 argument to low precision."""
    given = arguments(node)
    written = next((name for name in _WRITTEN if name in given and "self" in given), None)
    if written is not None:
        return Conversion((written,), "self", tuple(given))
    wide = tuple(name for name, value in given.items() if {x.name for x in _tensors(value)} & {*mixture.wide})
    return Conversion(wide, _first_with(given, mixture.low), tuple(given))


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
