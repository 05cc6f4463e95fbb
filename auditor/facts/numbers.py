"""What arithmetic leads to a value: whole numbers, divisors, and how many additions it has been through."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import fx

from ..records import Capture, NodeRange
from .graph import CASTS, arguments, dtype, is_transparent, op_of, packet, source
from .values import nearest_range

_ADDITIONS = frozenset({"aten.add", "aten.sub", "aten.rsub"})
_SCALINGS = frozenset({"aten.mul", "aten.div"})
_DIVISORS: Mapping[str, str] = {
    "aten.div": "other",
    "aten.reciprocal": "self",
    "aten.rsqrt": "self",
    "aten.log": "self",
    "aten.log2": "self",
    "aten.log10": "self",
}


def whole_numbers(node: fx.Node) -> bool:
    """Whether the node's floating values are whole numbers by construction."""
    name = packet(op_of(node))
    return _is_floating(node) and name in {*CASTS, "aten.arange"} and _is_whole(node)


def reads_whole_numbers(node: fx.Node) -> bool:
    """Whether a floating node computes on whole numbers."""
    computes = not is_transparent(op_of(node)) and node.op == "call_function"
    return computes and _is_floating(node) and any(_is_whole(item) for item in node.all_input_nodes)


def _is_whole(node: fx.Node) -> bool:
    origin = source(node)
    if packet(op_of(origin)) == "aten.arange":
        return all(float(item).is_integer() for item in origin.args if isinstance(item, (int, float)))
    held = dtype(origin)
    return held is not None and not held.is_floating_point and not held.is_complex and held.itemsize > 1


def _is_floating(node: fx.Node) -> bool:
    held = dtype(node)
    return held is not None and held.is_floating_point


def divisor_min_abs(node: fx.Node, ranges: Mapping[str, NodeRange]) -> float | None:
    """Smallest non-zero magnitude of the tensor a quotient, a reciprocal or a logarithm is taken of."""
    name = packet(op_of(node))
    divisor: Any = arguments(node).get(_DIVISORS.get(name, ""))
    if not isinstance(divisor, fx.Node):
        return None
    found = nearest_range(divisor, ranges)
    return found.min_abs if found and found.max_abs else None


def additions(capture: Capture) -> dict[fx.Node, int]:
    """Per node, the longest run of additions behind it: `h + f(h)` lengthens the run of h, not that of f's inside."""
    found: dict[fx.Node, int] = {}
    for node in capture.graph_module.graph.nodes:
        longest = max((found[item] for item in node.all_input_nodes), default=0)
        name = packet(op_of(node))
        scales = name in _SCALINGS and len(node.all_input_nodes) == 1
        adds = name in _ADDITIONS and len(node.all_input_nodes) == 2
        found[node] = longest + adds if adds or scales or is_transparent(op_of(node)) else 0
    return found
