"""Finds comparisons and gradients that torch.compile changes: a value, computed again without its rounding, is compared
with its rounded extreme.

A compiled kernel keeps the results of pointwise operations in FP32, and rounds what it stores. An extreme (a maximum or
a minimum) is stored. The values that it was taken from are often not: a later kernel computes them again, and none of
them equals the rounded extreme. The gradient of an extreme is shared by the entries that equal it, so it becomes 0/0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from itertools import permutations

import torch
from torch import fx

from ..capture.builder import carries_gradient
from ..capture.capture import record_with_gradients
from ..capture.paths import reach, same_operations
from ..errors import let_through
from ..execution.policy import Policy, plain
from ..execution.resolve import Resolution, resolve
from ..numerics.nodes import arguments, arguments_with_defaults, dtype, row_of
from ..records import Capture, Magnitudes, Subject
from .mixed import in_line

RangeOf = Callable[[str], Magnitudes | None]
"""The magnitudes of a node's values, by its name; None if unknown."""

_SELECTING = {
    *("abs", "neg", "positive", "sign", "sgn", "floor", "ceil", "round", "trunc"),
    *("relu", "relu6", "leaky_relu", "hardtanh", "hardshrink", "threshold"),
    *("clamp", "clamp_min", "clamp_max", "maximum", "minimum", "fmax", "fmin"),
    *("where", "masked_fill", "nan_to_num", "tril", "triu"),
}
"""Operations whose results are entries of an argument, or as many bits of them: they round nothing."""
_UNTAGGED = {"glu", "log_sigmoid", "prelu", "hardswish", "floor_divide", "_softmax", "_safe_softmax"}
"""Pointwise operations that torch does not tag as such."""
_LAST_STEPS = {"mean", "nanmean", "std", "logsumexp"}
"""Reductions whose last step, such as the division of a mean, is computed again entry by entry."""
_EXTREMES = {"amax", "amin", "aminmax", "max", "min"}
_NORMS = {"linalg_vector_norm": "ord", "norm": "p", "dist": "p"}
"""{norm: the name of its order}. A norm of infinite order is the largest magnitude."""
_COMPARISONS = {"eq", "ne", "ge", "gt", "le", "lt"}
_MASK = 1e3
"""Minimum magnitude of the non-zero terms of a mask that is added to scores: where they are zero, no bit changes."""


Recomputed = Mapping[str, Mapping[str, str]]
"""{operation: {strategy: the operation upstream that is computed again without rounding, with its source line}}."""


def unrounded_comparisons(
    capture: Capture, ranges: Mapping[str, Magnitudes], under: Mapping[str, Resolution]
) -> Recomputed:
    """The comparisons of a value with its own rounded extreme.

    ranges: magnitudes measured in FP32; under: {strategy: dtypes with everything in low precision}.
    """
    return _described(capture, under, lambda low: _compared(capture, low, ranges.get))


def unrounded_gradients(
    captured: Capture, step: Capture, receiving: Collection[str], range_of: RangeOf, fmt: str
) -> Recomputed:
    """The extremes in the audited graph whose backward pass compares unrounded values with the rounded extreme.

    step: the recorded training step. receiving: operations of the step whose results receive a gradient.
    """
    under = {name: resolve(Policy(step, name, plain(fmt), fmt)) for name in ("autocast", "cast")}
    of_step = _described(step, under, lambda low: _differentiated(step, receiving, low, range_of))
    same = same_operations(step, captured)
    return {same[name]: makers for name, makers in of_step.items() if name in same}


def unrounded_if_trained(
    captured: Capture, subject: Subject, ranges: Mapping[str, Magnitudes], fmt: str, seed: int
) -> Recomputed:
    """The extremes whose gradients a compiler may turn NaN if the model is trained, known without a training step.

    Only if the audited graph has such extremes, the model is recorded once more, with gradients enabled, to see which
    of them would receive a gradient. A model that does not run with gradients cannot be trained. ranges: magnitudes
    measured in FP32.
    """
    extremes = {node.name for node in captured.graph_module.graph.nodes if is_extreme(node)}
    if not extremes:
        return {}
    under = {name: resolve(Policy(captured, name, plain(fmt), fmt)) for name in ("autocast", "cast")}
    found = _described(captured, under, lambda low: _differentiated(captured, extremes, low, ranges.get))
    if not found:
        return {}
    try:
        recorded = record_with_gradients(subject, seed)
    except Exception as error:
        let_through(error)
        return {}
    same = same_operations(recorded, captured)
    receiving = {same.get(name) for name in _receiving(recorded)}
    return {name: makers for name, makers in found.items() if name in receiving}


def _receiving(recorded: Capture) -> list[str]:
    """Operations of a run recorded with gradients whose results would receive a gradient from the outputs."""

    def differentiated(node: fx.Node) -> list[fx.Node]:
        """The inputs to which a backward pass hands a gradient."""
        if row_of(node).asks_shape:
            return []
        return [source for source in node.all_input_nodes if carries_gradient(source)]

    nodes = {node.name: node for node in recorded.graph_module.graph.nodes}
    outputs = [nodes[name] for name in recorded.outputs]
    reached = reach(filter(carries_gradient, outputs), differentiated)
    return [node.name for node in reached]


def _described(
    capture: Capture, under: Mapping[str, Resolution], find: Callable[[_Low], dict[str, fx.Node]]
) -> Recomputed:
    """{operation that `find` returns: {strategy: the operation in words whose rounding a compiler drops}}."""
    result = dict[str, dict[str, str]]()
    for strategy, resolution in under.items():
        for name, maker in find(_Low(capture, resolution)).items():
            text = f"`{row_of(maker).name}`{in_line(capture.nodes[maker.name].source)}"
            result.setdefault(name, {})[strategy] = text
    return result


def _differentiated(step: Capture, receiving: Collection[str], low: _Low, range_of: RangeOf) -> dict[str, fx.Node]:
    """{extreme that receives a gradient: the operation whose rounding a compiler drops}."""
    result = dict[str, fx.Node]()
    for node in step.graph_module.graph.nodes:
        if node.name in receiving and is_extreme(node) and low(node):
            maker = low.rounded_by(node.all_input_nodes, range_of)
            if maker is not None:
                result[node.name] = maker
    return result


def _compared(capture: Capture, low: _Low, range_of: RangeOf) -> dict[str, fx.Node]:
    """{comparison of a value with its extreme: the operation whose rounding a compiler drops}."""
    result = dict[str, fx.Node]()
    for node in capture.graph_module.graph.nodes:
        pair = _compared_values(node)
        for value, other in permutations(pair, 2):
            maker = low.rounded_by([value], range_of)
            if maker is not None and _is_extreme_of(other, value):
                result[node.name] = maker
    return result


def _compared_values(node: fx.Node) -> list[fx.Node]:
    """The two values that an operation compares; none if it compares no two. `x - y == 0` and `x / y == 1` count."""
    if row_of(node).packet not in _COMPARISONS:
        return []
    given = arguments(node)
    left, right = given.get("self"), given.get("other")
    if isinstance(left, fx.Node) and isinstance(right, fx.Node):
        return [left, right]
    if isinstance(left, fx.Node) and len(left.all_input_nodes) == 2:
        packet = row_of(left).packet
        if (packet, right) in (("sub", 0), ("rsub", 0), ("div", 1)):
            return [*left.all_input_nodes]
    return []


def is_extreme(node: fx.Node) -> bool:
    """Whether the operation's gradient goes to the entries that equal its result: a maximum or minimum that returns no
    indices, or a norm of infinite order."""
    packet = row_of(node).packet
    if packet in _NORMS:
        order = arguments_with_defaults(node).get(_NORMS[packet])
        return isinstance(order, (int, float)) and math.isinf(order)
    return packet in _EXTREMES and len(node.all_input_nodes) == 1 and not _returns_indices(node)


def _returns_indices(node: fx.Node) -> bool:
    """Whether `max` or `min` was called with a dimension: its gradient goes by the indices that it returns."""
    return row_of(node).packet in ("max", "min") and "dim" in arguments(node)


def _is_extreme_of(node: fx.Node, value: fx.Node) -> bool:
    """Whether a node is the extreme of `value`, or of what `value` was selected from, or is selected from the extreme."""
    values = set(reach([value], _selected_from))
    sources = list[fx.Node]()
    for each in reach([node], _selected_from):
        if row_of(each).packet in (*_EXTREMES, *_NORMS):
            sources += each.all_input_nodes
    return any(each in values for each in reach(sources, _selected_from))


def _selected_from(node: fx.Node) -> list[fx.Node]:
    """The inputs of which the node's entries are entries."""
    return _floating_inputs(node) if node.op == "call_function" and _selects(node) else []


class _Low:
    """The low-precision values of a graph under one strategy."""

    def __init__(self, capture: Capture, resolution: Resolution) -> None:
        self._resolution = resolution
        self._learned = {place.name for place in capture.placeholders if place.kind == "parameter"}
        for node in capture.graph_module.graph.nodes:
            if any(source.name in self._learned for source in node.all_input_nodes):
                self._learned.add(node.name)

    def __call__(self, node: fx.Node) -> bool:
        """Whether the node's result is in low precision."""
        return self._resolution.low(node.name)

    def rounded_by(self, nodes: Collection[fx.Node], range_of: RangeOf) -> fx.Node | None:
        """The pointwise operation that rounds the values of one of the nodes, which later operations only select;
        None if a compiler stores all of them, rounded: the results of products and sums, and inputs."""

        def unchanged(node: fx.Node) -> list[fx.Node]:
            return [each for each in self._unchanged_inputs(node, range_of) or () if self._is_computed(each)]

        reached = reach([node for node in nodes if self._is_computed(node)], unchanged)
        return next((node for node in reached if self._unchanged_inputs(node, range_of) is None), None)

    def _is_computed(self, node: fx.Node) -> bool:
        """Whether an operation computes the node in low precision."""
        return node.op == "call_function" and self(node)

    def _unchanged_inputs(self, node: fx.Node, range_of: RangeOf) -> list[fx.Node] | None:
        """The inputs whose bits the result keeps; None if a pointwise operation rounds its result; none of them if the
        operation is not pointwise, so that its result is stored."""
        row, floating = row_of(node), _floating_inputs(node)
        if row.thins:
            return floating if _is_power_of_two(_kept_share(node)) else None
        if row.cast:
            return floating if all(map(self, floating)) else None
        if _selects(node):
            return floating
        if not _is_pointwise(node):
            return []
        if not (row.sum or row.scales) or len(_operands(node)) != 2:
            return None
        first, second = _operands(node)
        if self._keeps_bits(node, second, range_of):
            return _nodes(first)
        commutes = row.packet in ("add", "mul")
        return _nodes(second) if commutes and self._keeps_bits(node, first, range_of) else None

    def _keeps_bits(self, node: fx.Node, operand: object, range_of: RangeOf) -> bool:
        """Whether one operand of a sum, product or quotient leaves the bits of the other as they are."""
        if isinstance(operand, (int, float)):
            return _is_power_of_two(operand) if row_of(node).scales else operand == 0
        if not isinstance(operand, fx.Node) or operand.name in self._learned:
            return False  # a value that depends on a parameter changes in training
        if dtype(operand) is torch.bool:
            return row_of(node).scales
        span = range_of(operand.name)
        if span is None:
            return False
        if row_of(node).scales:
            return span.max_abs == span.min_abs and _is_power_of_two(span.max_abs)
        is_mask = span.zeros > 0 and span.min_abs >= _MASK
        return span.max_abs == 0 or is_mask


def _is_pointwise(node: fx.Node) -> bool:
    """Whether a compiler computes the operation's last step entry by entry, inside the kernels that read it."""
    row = row_of(node)
    tagged = torch.Tag.pointwise in getattr(node.target, "tags", ())
    return tagged or bool(row.normalizes) or row.packet in _UNTAGGED | _LAST_STEPS


def _selects(node: fx.Node) -> bool:
    """Whether the operation's entries are entries of its input: reshapes, selections, and masks. Concatenations store
    what they join."""
    row = row_of(node)
    moves = bool(row.entries) or row.packet in ("pad", "constant_pad_nd", "gather")
    return moves or row.masks or row.packet in _SELECTING


def _floating_inputs(node: fx.Node) -> list[fx.Node]:
    floating = []
    for source in node.all_input_nodes:
        dtype_of_source = dtype(source)
        if dtype_of_source is not None and dtype_of_source.is_floating_point:
            floating.append(source)
    return floating


def _operands(node: fx.Node) -> list[object]:
    """The two operands of an arithmetic operation: tensors or numbers."""
    given = arguments(node)
    return [given[name] for name in ("self", "other") if name in given]


def _nodes(operand: object) -> list[fx.Node]:
    return [operand] if isinstance(operand, fx.Node) else []


def _kept_share(node: fx.Node) -> float:
    """The share of entries that dropout keeps, by which it divides them."""
    share = next((value for value in node.args[1:] if isinstance(value, float)), math.nan)
    return 1.0 - share


def _is_power_of_two(number: float) -> bool:
    return math.isfinite(number) and number != 0 and abs(math.frexp(number)[0]) == 0.5
