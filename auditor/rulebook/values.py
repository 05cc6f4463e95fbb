"""Numbers a node meets: literals among its arguments, what formats make of those, and magnitudes measured in FP32."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import fx

from ..numerics.casting import round_to
from ..numerics.formats import FORMATS, Format, narrower
from ..numerics.nodes import arguments, arguments_with_defaults, row_of, shape, source
from ..records import Capture, Magnitudes

_LARGEST_EPS = 1e-2


def constants(node: fx.Node, derived: frozenset[int | str]) -> tuple[float, ...]:
    """Finite literals in the places of the call that take a number or a tensor; axes and sizes are no literals.

    derived: arguments whose literal Python computed from a dtype, and which so follow the format by themselves.
    """
    if not isinstance(node.target, torch._ops.OpOverload):
        return ()
    found = []
    for index, argument in enumerate(node.target._schema.arguments):
        key: int | str = index if index < len(node.args) else argument.name
        held: Any = node.args[index] if index < len(node.args) else node.kwargs.get(argument.name)
        numeric = any(name in str(argument.type) for name in ("Tensor", "number", "Scalar", "float"))
        literal = isinstance(held, (int, float)) and not isinstance(held, bool)
        if numeric and literal and key not in derived and math.isfinite(held):
            found.append(float(held))
    return tuple(found)


def eps(node: fx.Node, literals: tuple[float, ...]) -> float | None:
    """The op's `eps` argument, or the small positive literal that an add or a clamp puts under a denominator."""
    given = arguments_with_defaults(node).get("eps")
    if isinstance(given, float):
        return given
    small = [literal for literal in literals if 0 < literal <= _LARGEST_EPS]
    return min(small) if small and row_of(node).guards else None


def squares(node: fx.Node) -> bool:
    """Whether the node is x ** 2, x.square() or x * x."""
    name, args = row_of(node).packet, arguments(node)
    if name == "pow":
        return args.get("exponent") == 2 and isinstance(args.get("self"), fx.Node)
    if name == "mul":
        return _uncast(args.get("self")) is _uncast(args.get("other"))
    return name == "square"


def _uncast(node: Any) -> Any:
    """The node before its casts; not before its selections, since two chunks of a tensor are two tensors.

    What is cast may be a number: under vmap torch hands literals on as tensors, and casts those.
    """
    while isinstance(node, fx.Node) and row_of(node).cast and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def centres(node: fx.Node) -> bool:
    """Whether the node is x minus its own mean; a sum that is scaled counts as one."""
    taken = _subtracted(node)
    if taken is not None and row_of(taken).scales and len(taken.all_input_nodes) == 1:
        taken = source(taken.all_input_nodes[0])
        return row_of(taken).packet == "sum" and _reads_minuend(node, taken)
    return taken is not None and row_of(taken).packet == "mean" and _reads_minuend(node, taken)


def shifts_by_max(node: fx.Node) -> bool:
    """Whether the node is x minus its own largest entries, or about so much."""
    taken = _subtracted(node)
    return taken is not None and row_of(taken).maximum and _reads_minuend(node, taken)


def _subtracted(node: fx.Node) -> fx.Node | None:
    """What a difference of two tensors takes off the first."""
    if row_of(node).packet != "sub" or len(node.all_input_nodes) < 2:
        return None
    return source(node.all_input_nodes[1])


def _reads_minuend(node: fx.Node, reduction: fx.Node) -> bool:
    return source(node.all_input_nodes[0]) in {source(item) for item in reduction.all_input_nodes}


def input_max_abs(node: fx.Node, ranges: Mapping[str, Magnitudes], weights: frozenset[str]) -> float | None:
    """Largest magnitude among the node's activations, each taken where it was measured last; `weights` are none."""
    activations = [item for item in node.all_input_nodes if source(item).name not in weights]
    return largest([item.max_abs for item in (nearest_range(item, ranges) for item in activations) if item])


def nearest_range(node: fx.Node, ranges: Mapping[str, Magnitudes]) -> Magnitudes | None:
    """Magnitudes of the node, measured at the nearest place above it that holds the same values."""
    for candidate in _upwards(node):
        if candidate.name in ranges:
            return ranges[candidate.name]
    return None


def _upwards(node: fx.Node) -> Iterator[fx.Node]:
    yield node
    while row_of(node).transparent and node.all_input_nodes:
        node = node.all_input_nodes[0]
        yield node


def headroom_bits(max_abs: float | None, row: Format) -> float | None:
    """log2(largest / max_abs): how often the value may double before it overflows; negative once it has."""
    return math.log2(row.largest / max_abs) if max_abs else None


def spacing(max_abs: float | None, row: Format) -> float | None:
    """Distance of the format's numbers in the binade of the value; where it is subnormal, of the subnormal ones."""
    if not max_abs:
        return None
    return math.ldexp(1.0, max(math.frexp(max_abs)[1] - 1, row.min_exponent) - row.mantissa)


def numel(node: fx.Node) -> int | None:
    """Elements of the node's (first) output, None where its shape is not known."""
    try:
        return math.prod(shape(node))
    except ValueError:
        return None


def derived_arguments(capture: Capture) -> dict[str, frozenset[int | str]]:
    """Per node, the arguments whose literal changes with the format."""
    found = {}
    for name, node in capture.nodes.items():
        changed = [*node.literals.values(), *node.autocast_literals.values()]
        found[name] = frozenset(key for literals in changed for key in literals.arguments)
    return found


def smallest(values: list[Any]) -> float | None:
    """The smallest of the known values, None if none is known."""
    known = [value for value in values if value is not None]
    return min(known) if known else None


def largest(values: list[Any]) -> float | None:
    """The largest of the known values, None if none is known."""
    known = [value for value in values if value is not None]
    return max(known) if known else None


def formats_where(holds: Callable[[float, str], bool], literals: tuple[float, ...]) -> tuple[str, ...]:
    """Names of the formats in which `holds(literal, format)` is true of some literal."""
    return tuple(name for name in narrower() if any(holds(literal, name) for literal in literals))


def beyond(literal: float, name: str) -> bool:
    """Whether rounding to the format leaves its range: to infinity, or, where it has none, down to its largest number."""
    return abs(_rounded(literal, name)) == float("inf") or (
        FORMATS[name].overflows_to == "largest" and abs(literal) > FORMATS[name].largest
    )


def as_one(literal: float, name: str) -> bool:
    """Whether a literal other than one is one in the format."""
    return literal != 1 and _rounded(literal, name) == 1


@lru_cache(maxsize=4096)
def _rounded(literal: float, name: str) -> float:
    return float(round_to(torch.tensor(literal, dtype=torch.float32), name))


LEAST = 1e3
"""Magnitude from which on a literal hides scores instead of scaling or shifting them."""
EXACT = 1e-6
"""What FP32 leaves of a literal."""
NEAR = 0.1
"""What scores may take away from a mask that is added to them."""


def written(capture: Capture, ranges: Mapping[str, Magnitudes]) -> frozenset[str]:
    """Names of the operations whose largest magnitude is a literal, or a constant's that holds one number beside zeros.

    What only passes such a value on, or scales it, is among them; a bound that values are clamped to is no such literal.
    """
    found: set[str] = set()
    made = {place.name for place in capture.placeholders if place.kind == "constant"}
    for node in capture.graph_module.graph.nodes:
        span = ranges.get(node.name)
        if span is None or span.max_abs < LEAST:
            continue
        if node.op == "placeholder":
            alone = math.isclose(span.max_abs, span.min_abs, rel_tol=EXACT)
            own = alone and (span.zeros > 0 or node.name in made)
        else:
            own = _is_written(node, span.max_abs)
        if own or any(
            _passes(node, source, span.max_abs, ranges) for source in node.all_input_nodes if source.name in found
        ):
            found.add(node.name)
    return frozenset(found & capture.nodes.keys())


def _is_written(node: fx.Node, largest: float) -> bool:
    row = row_of(node)
    bounds = row.kink and not row.promotes
    return not bounds and any(
        math.isclose(largest, abs(literal), rel_tol=EXACT) for literal in constants(node, frozenset())
    )


def _passes(node: fx.Node, source: fx.Node, largest: float, ranges: Mapping[str, Magnitudes]) -> bool:
    return row_of(node).scales or math.isclose(largest, ranges[source.name].max_abs, rel_tol=NEAR)
