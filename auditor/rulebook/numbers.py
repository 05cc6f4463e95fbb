"""What arithmetic leads to a value: whole numbers, phases, divisors, bits that cancel, and runs of additions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import fx

from ..numerics.formats import FORMATS, narrower
from ..numerics.nodes import argument_at, arguments, dtype, is_collective, op_of, row_of, source
from ..records import Capture, Magnitudes
from .values import nearest_range, spacing


def whole_numbers(node: fx.Node) -> bool:
    """Whether the node's floating values are whole numbers by construction."""
    row = row_of(node)
    return is_floating(node) and (row.cast or row.packet == "arange") and _is_whole(node)


def reads_whole_numbers(node: fx.Node) -> bool:
    """Whether a floating node computes on whole numbers."""
    computes = not row_of(node).transparent and node.op == "call_function"
    return computes and is_floating(node) and any(_is_whole(item) for item in node.all_input_nodes)


def _is_whole(node: fx.Node) -> bool:
    origin = source(node)
    if row_of(origin).packet == "arange":
        return all(float(item).is_integer() for item in origin.args if isinstance(item, (int, float)))
    held = dtype(origin)
    return held is not None and not held.is_floating_point and not held.is_complex and held.itemsize > 1


def is_floating(node: fx.Node) -> bool:
    """Whether its (first) result is a floating tensor."""
    held = dtype(node)
    return held is not None and held.is_floating_point


def divisor_min_abs(node: fx.Node, ranges: Mapping[str, Magnitudes]) -> float | None:
    """Smallest non-zero magnitude of the tensor a quotient, a reciprocal or a logarithm is taken of."""
    position = row_of(node).singular
    divisor = argument_at(node, position) if position is not None else None
    if not isinstance(divisor, fx.Node):
        return None
    found = nearest_range(divisor, ranges)
    return found.min_abs if found and found.max_abs else None


def phases(capture: Capture) -> set[fx.Node]:
    """Nodes whose values reach a sine or cosine through products, sums, joins and reshapes alone."""
    found: set[fx.Node] = set()
    for node in reversed(capture.graph_module.graph.nodes):
        if any(row_of(user).wave or (user in found and _shapes_a_phase(user)) for user in node.users):
            found.add(node)
    return found


def _shapes_a_phase(node: fx.Node) -> bool:
    row = row_of(node)
    return row.sum or row.scales or row.product or row.joins or row.transparent


def cancelled_bits(node: fx.Node, into: float | None, out: float | None) -> float | None:
    """Bits that cancel in a sum or difference of two tensors, whose magnitudes are `into` and `out`."""
    of_two = row_of(node).sum and len(node.all_input_nodes) == 2
    return math.log2(into / out) if of_two and into and out else None


def reduce_op(node: fx.Node) -> str | None:
    """The reduction that a functional collective was asked for."""
    asked = arguments(node).get("reduce_op") if is_collective(op_of(node)) else None
    return asked if isinstance(asked, str) else None


@dataclass(frozen=True)
class Run:
    """Additions to one value. lost: {format: sum of the largest magnitudes of the updates too small for it}; absorbed: see NodeFacts."""

    length: int = 0
    lost: Mapping[str, float] = field(default_factory=dict)
    absorbed: Mapping[str, float | None] = field(default_factory=dict)


def additions(capture: Capture, ranges: Mapping[str, Magnitudes]) -> dict[fx.Node, Run]:
    """The run of additions that ends at each node, none elsewhere: in `h + f(h)` it is that of h."""
    runs: dict[fx.Node, Run] = {}
    for node in capture.graph_module.graph.nodes:
        longest = max((runs[item] for item in node.all_input_nodes), key=lambda run: run.length, default=Run())
        runs[node] = _longer(longest, node, ranges) if _adds(node) else longest if _carries(node) else Run()
    goes_on: dict[fx.Node, bool] = {}
    for node in reversed(capture.graph_module.graph.nodes):
        goes_on[node] = any(_adds(user) or (_carries(user) and goes_on[user]) for user in node.users)
    return {node: run if _adds(node) and not goes_on[node] else Run() for node, run in runs.items()}


def _longer(run: Run, node: fx.Node, ranges: Mapping[str, Magnitudes]) -> Run:
    """The run and one more addition. Of its two terms the larger is the value, the smaller the update."""
    found = [nearest_range(item, ranges) for item in node.all_input_nodes]
    known = sorted(item.max_abs for item in found if item)
    if len(known) < 2:
        return Run(run.length + 1, run.lost)
    update, value = known
    lost, absorbed = {}, {}
    for name in narrower():
        apart = spacing(value, FORMATS[name])
        vanishes = apart is not None and update <= apart / 2
        lost[name] = run.lost.get(name, 0.0) + (update if vanishes else 0.0)
        absorbed[name] = lost[name] / apart if apart else 0.0
    return Run(run.length + 1, lost, absorbed)


def _adds(node: fx.Node) -> bool:
    return row_of(node).packet == "add" and len(node.all_input_nodes) == 2


def _carries(node: fx.Node) -> bool:
    """Whether the node holds its input's values, perhaps scaled by a literal."""
    row = row_of(node)
    return (row.scales and len(node.all_input_nodes) == 1) or row.transparent
