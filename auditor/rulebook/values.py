"""Numbers at a node: literals, their rounding, measured magnitudes, and the arithmetic that computes a value."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import fx

from ..numerics.casting import round_to
from ..numerics.formats import FORMATS, Format, narrower
from ..numerics.nodes import (
    argument_at,
    arguments,
    arguments_with_defaults,
    dtype,
    is_collective,
    op_of,
    row_of,
    shape,
    source,
)
from ..records import Capture, Magnitudes

_LARGEST_EPS = 1e-2


def constants(node: fx.Node, derived: frozenset[int | str]) -> tuple[float, ...]:
    """Finite literals among the arguments that are numbers or tensors; not axes and sizes.

    derived: arguments that Python computed from a dtype, which adapt to the format.
    """
    if not isinstance(node.target, torch._ops.OpOverload):
        return ()
    result = []
    for index, argument in enumerate(node.target._schema.arguments):
        key: int | str = index if index < len(node.args) else argument.name
        value: Any = node.args[index] if index < len(node.args) else node.kwargs.get(argument.name)
        numeric = any(name in str(argument.type) for name in ("Tensor", "number", "Scalar", "float"))
        literal = isinstance(value, (int, float)) and not isinstance(value, bool)
        if numeric and literal and key not in derived and math.isfinite(value):
            result.append(float(value))
    return tuple(result)


def eps(node: fx.Node, literals: tuple[float, ...]) -> float | None:
    """The operation's `eps` argument, or a small positive literal in an add or clamp."""
    given = arguments_with_defaults(node).get("eps")
    if isinstance(given, float):
        return given
    small = [literal for literal in literals if 0 < literal <= _LARGEST_EPS]
    return min(small) if small and row_of(node).guards else None


def squares(node: fx.Node) -> bool:
    """Whether the node computes a square: x ** 2, x.square() or x * x."""
    name, args = row_of(node).packet, arguments(node)
    if name == "pow":
        return args.get("exponent") == 2 and isinstance(args.get("self"), fx.Node)
    if name == "mul":
        return _uncast(args.get("self")) is _uncast(args.get("other"))
    return name == "square"


def _uncast(node: Any) -> Any:
    """The node upstream of its casts; selections are not skipped, since two chunks of a tensor differ.

    The source may be a number: under vmap torch passes literals as tensors, with casts.
    """
    while isinstance(node, fx.Node) and row_of(node).cast and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def centres(node: fx.Node) -> bool:
    """Whether the node computes x minus the mean of x; a scaled sum counts as a mean."""
    taken = _subtrahend(node)
    if taken is not None and row_of(taken).scales and len(taken.all_input_nodes) == 1:
        taken = source(taken.all_input_nodes[0])
        return row_of(taken).packet == "sum" and _reads_minuend(node, taken)
    return taken is not None and row_of(taken).packet == "mean" and _reads_minuend(node, taken)


def shifts_by_max(node: fx.Node) -> bool:
    """Whether the node computes x minus the maximum of x, or minus its smooth maximum (logsumexp)."""
    taken = _subtrahend(node)
    return taken is not None and row_of(taken).maximum and _reads_minuend(node, taken)


def _subtrahend(node: fx.Node) -> fx.Node | None:
    """The node that a `sub` of two nodes subtracts; None for other operations."""
    if row_of(node).packet != "sub" or len(node.all_input_nodes) < 2:
        return None
    return source(node.all_input_nodes[1])


def _reads_minuend(node: fx.Node, reduction: fx.Node) -> bool:
    return source(node.all_input_nodes[0]) in {source(item) for item in reduction.all_input_nodes}


def input_max_abs(node: fx.Node, ranges: Mapping[str, Magnitudes], weights: set[str]) -> float | None:
    """Largest magnitude of the node's inputs (see `nearest_range`), except the inputs in `weights`."""
    activations = [item for item in node.all_input_nodes if source(item).name not in weights]
    return max((result.max_abs for item in activations if (result := nearest_range(item, ranges))), default=None)


def nearest_range(node: fx.Node, ranges: Mapping[str, Magnitudes]) -> Magnitudes | None:
    """Magnitudes of the node's result. If that result was not measured: magnitudes of the nearest measured input with
    the same values."""
    return ranges.get(source(node, lambda each: each.name in ranges).name)


def headroom_bits(max_abs: float | None, row: Format) -> float | None:
    """log2(largest / max_abs): the number of doublings until the format overflows; negative beyond its range."""
    return math.log2(row.largest / max_abs) if max_abs else None


def spacing_at(max_abs: float | None, row: Format) -> float | None:
    """Spacing of a format's numbers, subnormal numbers included, at the magnitude `max_abs`."""
    if not max_abs:
        return None
    return math.ldexp(1.0, max(math.frexp(max_abs)[1] - 1, row.min_exponent) - row.mantissa)


def numel(node: fx.Node) -> int | None:
    """Number of elements of the node's first output; None if its shape is unknown."""
    try:
        return math.prod(shape(node))
    except ValueError:
        return None


def beyond(literal: float, name: str) -> bool:
    """Whether the format cannot represent the literal's magnitude: it becomes infinite, or the largest number."""
    return math.isinf(round_literal(literal, name)) or (
        FORMATS[name].overflows_to == "largest" and abs(literal) > FORMATS[name].largest
    )


@cache
def round_literal(literal: float, name: str) -> float:
    """Round a literal to a format."""
    return float(round_to(torch.tensor(literal, dtype=torch.float32), name))


LEAST = 1e3
"""Minimum magnitude of a literal that masks scores instead of scaling or shifting them."""
EXACT = 1e-6
"""Relative tolerance for recognizing a literal in FP32 values."""
NEAR = 0.1
"""Relative tolerance for recognizing a mask's literal after the mask was added to scores."""


def literal_results(capture: Capture, ranges: Mapping[str, Magnitudes]) -> frozenset[str]:
    """Operations whose result's largest magnitude is a literal, or the only non-zero value of a constant tensor.

    Operations that pass on or scale such a value are included; the bound of a clamp is not.
    """
    result: set[str] = set()
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
        passed = (ranges[source.name].max_abs for source in node.all_input_nodes if source.name in result)
        if own or any(row_of(node).scales or math.isclose(span.max_abs, most, rel_tol=NEAR) for most in passed):
            result.add(node.name)
    return frozenset(result & capture.nodes.keys())


def cast_constant(node: fx.Node, capture: Capture, ranges: Mapping[str, Magnitudes]) -> float | None:
    """The literal that is the largest magnitude of the values which a cast reads, as of an additive mask that was made in
    FP32; None for other operations, and for a literal that Python computed from a dtype."""
    if not row_of(node).cast or not is_floating(node) or not node.all_input_nodes:
        return None
    origin = source(node.all_input_nodes[0])
    record = capture.nodes.get(origin.name)
    span = nearest_range(origin, ranges)
    if record is None or span is None or span.max_abs < LEAST:
        return None
    derived = frozenset(key for of_format in record.literals.values() for key in of_format.arguments)
    literals = constants(origin, derived)
    return next((one for one in literals if math.isclose(span.max_abs, abs(one), rel_tol=EXACT)), None)


def _is_written(node: fx.Node, largest: float) -> bool:
    if row_of(node).kink and not row_of(node).promotes:
        return False
    return any(math.isclose(largest, abs(literal), rel_tol=EXACT) for literal in constants(node, frozenset()))


def whole_numbers(node: fx.Node) -> bool:
    """Whether the node's floating-point values are integers by construction."""
    row = row_of(node)
    return is_floating(node) and (row.cast or row.packet == "arange") and _is_whole(node)


def reads_whole_numbers(node: fx.Node) -> bool:
    """Whether a floating-point node computes on integers."""
    computes = not row_of(node).transparent and node.op == "call_function"
    return computes and is_floating(node) and any(_is_whole(item) for item in node.all_input_nodes)


def _is_whole(node: fx.Node) -> bool:
    origin = source(node)
    if row_of(origin).packet == "arange":
        return all(float(item).is_integer() for item in origin.args if isinstance(item, (int, float)))
    dtype_of_origin = dtype(origin)
    return (
        dtype_of_origin is not None
        and not dtype_of_origin.is_floating_point
        and not dtype_of_origin.is_complex
        and dtype_of_origin.itemsize > 1
    )


def is_floating(node: fx.Node) -> bool:
    """Whether the node's first result is a floating-point tensor."""
    dtype_of_node = dtype(node)
    return dtype_of_node is not None and dtype_of_node.is_floating_point


def divisor_min_abs(node: fx.Node, ranges: Mapping[str, Magnitudes]) -> float | None:
    """Smallest non-zero magnitude of the operand of a quotient, reciprocal or logarithm."""
    position = row_of(node).singular
    divisor = argument_at(node, position) if position is not None else None
    if not isinstance(divisor, fx.Node):
        return None
    result = nearest_range(divisor, ranges)
    return result.min_abs if result and result.max_abs else None


def phases(capture: Capture) -> set[fx.Node]:
    """Nodes whose values reach a sine or cosine only through products, sums, concatenations and reshapes."""
    result: set[fx.Node] = set()
    for node in reversed(capture.graph_module.graph.nodes):
        for row, onward in ((row_of(user), user in result) for user in node.users):
            passes = row.sum or row.scales or row.product or row.joins or row.transparent
            if row.wave or (onward and passes):
                result.add(node)
    return result


def cancelled_bits(node: fx.Node, into: float | None, out: float | None) -> float | None:
    """Bits that cancel in a sum or difference of two tensors. into, out: magnitudes of operands and result."""
    of_two = row_of(node).sum and len(node.all_input_nodes) == 2
    return math.log2(into / out) if of_two and into and out else None


def reduce_op(node: fx.Node) -> str | None:
    """The reduction of a collective operation, such as "sum"; None for other operations."""
    asked = arguments(node).get("reduce_op") if is_collective(op_of(node)) else None
    return asked if isinstance(asked, str) else None


@dataclass(frozen=True)
class AdditionRun:
    """Repeated additions to one value. lost: {format: sum of the updates of at most half a spacing}; absorbed: as in
    NodeFacts."""

    length: int = 0
    lost: Mapping[str, float] = field(default_factory=dict)
    absorbed: Mapping[str, float | None] = field(default_factory=dict)


def additions(capture: Capture, ranges: Mapping[str, Magnitudes]) -> dict[fx.Node, AdditionRun]:
    """The chain of additions that ends at each node: `h + f(h)` continues the chain of h."""
    nodes = list(capture.graph_module.graph.nodes)
    runs: dict[fx.Node, AdditionRun] = {}
    for node in nodes:
        longest = max((runs[item] for item in node.all_input_nodes), key=lambda run: run.length, default=AdditionRun())
        if _adds(node):
            runs[node] = _longer(longest, node, ranges)
        elif _carries(node):
            runs[node] = longest
        else:
            runs[node] = AdditionRun()

    # A run counts at its last addition only: where no reader of the sum adds to it.
    goes_on: dict[fx.Node, bool] = {}
    for node in reversed(nodes):
        goes_on[node] = any(_adds(user) or (_carries(user) and goes_on[user]) for user in node.users)
    return {node: run if _adds(node) and not goes_on[node] else AdditionRun() for node, run in runs.items()}


def _longer(run: AdditionRun, node: fx.Node, ranges: Mapping[str, Magnitudes]) -> AdditionRun:
    """The chain of additions that ends at `node`. The larger of the node's two terms counts as the running value,
    the smaller as the update."""
    length = run.length + 1
    magnitudes = [nearest_range(item, ranges) for item in node.all_input_nodes]
    known = sorted(magnitude.max_abs for magnitude in magnitudes if magnitude is not None)
    if len(known) < 2:
        return AdditionRun(length, run.lost)
    update, value = known
    lost = dict[str, float]()
    absorbed = dict[str, float]()
    for name in narrower():
        spacing = spacing_at(value, FORMATS[name]) or 0.0
        lost[name] = run.lost.get(name, 0.0)
        if update <= spacing / 2:  # the sum rounds back to the value
            lost[name] += update
        absorbed[name] = lost[name] / spacing if spacing else 0.0
    return AdditionRun(length, lost, absorbed)


def _adds(node: fx.Node) -> bool:
    return row_of(node).packet == "add" and len(node.all_input_nodes) == 2


def _carries(node: fx.Node) -> bool:
    """Whether the node's values are those of its input, possibly scaled by a literal."""
    row = row_of(node)
    return (row.scales and len(node.all_input_nodes) == 1) or row.transparent
