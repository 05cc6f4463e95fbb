"""Linear layers, convolutions and embeddings with quantized weights and inputs: results, errors, and their causes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import fx

from ..errors import PlanError
from ..numerics.nodes import arguments, op_of, row_of, shape, target_of, tensors_in, view_source
from ..numerics.quantize import Quantized, fake_quantize
from ..numerics.schemes import SCHEMES, Quantizer
from ..records import Capture

_ARGUMENTS = {
    "linear": (0, 1, 1),
    "conv1d": (0, 1, 1),
    "conv2d": (0, 1, 1),
    "conv3d": (0, 1, 1),
    "convolution": (0, 1, 1),
    "conv_transpose1d": (0, 1, 0),
    "conv_transpose2d": (0, 1, 0),
    "conv_transpose3d": (0, 1, 0),
    "addmm": (1, 2, 0),
    "embedding": (None, 0, 1),
}
"""{operation: (position of the input, position of the weight, the weight's dimension that is summed over)}."""

_PRODUCTS = {"_grouped_mm": 0, "bmm": 0, "matmul": 0, "mm": 0, "baddbmm": 1}
"""{product: position of its left factor, which the right one follows}. One of them may be a stack of experts' weights."""

_PICKS = ("select", "index_select", "index")
"""Operations that pick experts from a stack by their number, in its first dimension."""

_OUTLIER, _MOST_OUTLIERS = 4.0, 8
"""Factor by which an outlier channel's largest magnitude exceeds the channels' median; maximum number of outlier
channels. Outlier rows, such as a token of every text, may be up to half of all rows."""

_LISTED = 8
"""Maximum number of channels or rows that a place lists."""

_APART = 2.0
"""Factor by which each outlier's largest magnitude exceeds that of every other channel."""

_EASED = 0.5
"""Outliers count as the cause if the error of all other entries falls to this share when the outliers are removed."""

_WORSE_SLICE = 3.0
"""A slice of a fused weight (q, k or v) is the cause if its relative error is this many times that of any other."""

_PIECES = ("split", "split_with_sizes", "chunk", "unsafe_split", "unsafe_chunk")
_SPLITTING_VIEWS = ("view", "reshape", "unflatten")


class Roles(NamedTuple):
    """Positions of a layer's input and weight among the operation's arguments; given is None for an embedding. summed:
    the dimension of the weight that is summed over; spatial: number of dimensions of a convolution's kernel. given_summed:
    the dimension of the input that is summed over. stacked: whether the weight is a stack of experts' weights, or one
    picked from it."""

    given: int | None
    weight: int
    summed: int
    spatial: int
    given_summed: int = -1
    stacked: bool = False

    def quantizers(self, scheme: str) -> Iterator[tuple[int, Quantizer]]:
        """(position, quantizer) of the weight and, if the scheme quantizes it, of the input."""
        weight, activation = SCHEMES[scheme].weight, SCHEMES[scheme].activation
        yield self.weight, weight
        if self.given is not None and activation is not None:  # a convolution sums over positions too: no scale per row
            rows = self.spatial and activation.block == (1, 0)
            yield self.given, replace(activation, block=(0, 0)) if rows else activation


@dataclass(frozen=True)
class Layer:
    """A layer with a weight. given: the input; None for an embedding. key: the layer's name, see `key_of`."""

    node: fx.Node
    given: fx.Node | None
    weight: fx.Node
    key: str
    roles: Roles

    @property
    def kind(self) -> str:
        """The kind of layer, as in `Scheme.fits`: embedding | convolution | linear. Experts are linear layers."""
        if self.given is None:
            return "embedding"
        return "convolution" if self.roles.spatial else "linear"


def key_of(parameter: str) -> str:
    """A layer's name: the path of the module whose `weight` the parameter is; for other parameters, their full name."""
    return "" if parameter == "weight" else parameter.removesuffix(".weight")


def roles_of(op: str, args: Sequence[Any], shape_of: Callable[[Any], Sequence[int]] = shape) -> Roles | None:
    """Roles of an operation's arguments; None if the operation is no layer. shape_of: returns an argument's shape."""
    name = op.split(".")[1] if op.startswith("aten.") else ""
    if name not in _ARGUMENTS:
        return None
    given, weight, summed = _ARGUMENTS[name]
    transposed = name == "convolution" and bool(args[6])
    spatial = len(shape_of(args[weight])) - 2 if "conv" in name else 0
    return Roles(given, weight, 0 if transposed else summed, spatial, -1 - spatial)


def roles_of_experts(op: str, args: Sequence[Any], is_stack: Callable[[Any], bool]) -> Roles | None:
    """Roles of the arguments of a product with a stack of experts' weights [experts, *, *], or with experts picked from it;
    None for other operations. is_stack: whether an argument is one.

    The product shows which dimension is summed over, in both layouts: [experts, outputs, inputs] on the left of the input
    or transposed on its right, and [experts, inputs, outputs] on its right.
    """
    name = op.split(".")[1] if op.startswith("aten.") else ""
    if name == "linear" and is_stack(args[1]):
        return Roles(0, 1, -1, 0, stacked=True)
    left = _PRODUCTS.get(name)
    if left is None:
        return None
    right = left + 1
    if is_stack(args[right]):
        return Roles(left, right, -2, 0, stacked=True)
    if is_stack(args[left]):
        return Roles(right, left, -1, 0, given_summed=-2, stacked=True)
    return None


def picks_experts(op: str, args: Sequence[Any]) -> bool:
    """Whether an operation picks entries in the first dimension of its first argument only."""
    name = op.split(".")[1] if op.startswith("aten.") else ""
    if name == "index":
        return len(args[1]) == 1
    return name in _PICKS and args[1] == 0


def layers_of(capture: Capture) -> dict[str, Layer]:
    """{operation: Layer}, for layers whose weight is a parameter, possibly reshaped or transposed; and for products with a
    stack of experts' weights, or with experts picked from it."""
    names = {place.name: place.fqn or "" for place in capture.placeholders if place.kind in ("parameter", "buffer")}

    def root_of(weight: fx.Node) -> fx.Node:
        """The parameter of which a value is a view, or which it is picked from."""
        while True:
            source = view_source(weight)
            if source is None and weight.op == "call_function" and picks_experts(op_of(weight), weight.args):
                picked_from = weight.all_input_nodes[0]
                source = picked_from if len(shape(picked_from)) == 3 else None
            if source is None:
                return weight
            weight = source

    def is_stack(value: Any) -> bool:
        if not isinstance(value, fx.Node) or len(shape(value)) not in (2, 3):
            return False
        root = root_of(value)
        return root.name in names and len(shape(root)) == 3

    result = {}
    for n in capture.graph_module.graph.nodes:
        if n.op != "call_function":
            continue
        roles = roles_of_experts(op_of(n), n.args, is_stack) or roles_of(op_of(n), n.args)
        if roles is None:
            continue
        weight = n.args[roles.weight]
        root = root_of(weight)
        if root.name in names and len(shape(weight)) > 1:
            given = None if roles.given is None else n.args[roles.given]
            result[n.name] = Layer(n, given, weight, key_of(names[root.name]), roles)
    return result


def multiplied_weights(capture: Capture) -> set[str]:
    """Names of the parameters that products and embeddings read, directly or in parts, such as the experts in one weight;
    layers by their name, see `key_of`."""
    places = {place.name: place.fqn or "" for place in capture.placeholders if place.kind == "parameter"}

    def reads(n: fx.Node) -> bool:
        """Whether a product reads a value, directly or through operations that move or select its entries."""
        waiting, seen = [n], set[fx.Node]()
        while waiting:
            for user in waiting.pop().users:
                row = row_of(user)
                if row.product or row.embedding:
                    return True
                if user not in seen and (row.transparent or row.exact or row.packet == "index"):
                    seen.add(user)
                    waiting.append(user)
        return False

    nodes = [n for n in capture.graph_module.graph.nodes if n.name in places and len(shape(n)) > 1]
    return {key_of(places[n.name]) for n in nodes if reads(n)}


def key_layers(capture: Capture) -> set[str]:
    """Names of the layers that compute attention's keys, in fused attention or for a matrix product whose result a
    softmax reads."""
    layers, result, seen = layers_of(capture), set[str](), set[fx.Node]()
    waiting = list[fx.Node]()
    for n in capture.graph_module.graph.nodes:
        if row_of(n).attention and "key" in (given := arguments(n)):
            waiting.append(given["key"])
        if row_of(n).distribution == "probabilities":
            scores = n.all_input_nodes[0]
            while (row := row_of(scores)).scales or row.sum or row.transparent or row.masks:
                scores = scores.all_input_nodes[0]
            waiting += scores.all_input_nodes[1:2] if row.gemm == "product" else []
    while waiting:
        if (n := waiting.pop()).name in layers:
            result.add(n.name)
        elif n not in seen:
            seen.add(n)
            waiting += n.all_input_nodes
    return result


def require_layers(captures: Sequence[Capture], schemes: Iterable[str]) -> None:
    """Raises: PlanError(slug="no-layer") if a scheme can quantize no layer of the model."""
    layers = [layer for capture in captures for layer in layers_of(capture).values()]
    for scheme in schemes:
        if any(fits(layer, scheme) for layer in layers):
            continue
        reasons = {kind: f"no kernel supports the {kind}s" for kind in ("embedding", "convolution")}
        sizes = "x".join(map(str, SCHEMES[scheme].multiples))
        reasons["linear"] = f"the sizes of the linear layers are not multiples of {sizes} (outputs x inputs)"
        why = ", and ".join(reasons[kind] for kind in sorted({layer.kind for layer in layers}, reverse=True))
        why = why or "the model has no linear layer, convolution or embedding whose weight is a parameter"
        raise PlanError(f"no layer can be quantized as `{scheme}`: {why}. Remove {scheme} from --formats", "no-layer")


def fits(layer: Layer, scheme: str) -> bool:
    """Whether kernels exist for a layer under a scheme."""
    sizes = shape(layer.weight)
    columns = sizes[layer.roles.summed]
    if layer.roles.stacked:
        sizes = sizes[-2:]
    return SCHEMES[scheme].fits(layer.kind, math.prod(sizes) // columns, columns)


@dataclass(frozen=True)
class Part:
    """The weight or input of a layer as a matrix [rows, channels], before and after quantization; rows of a weight are
    output channels. name: weight | activation; values: after quantization, in the argument's shape. channels: number of
    channels in a row, which a convolution's weight repeats for every position of its kernel. has_zero_block: whether a
    block is all zero and the scheme divides by a scale of zero; these entries are 0 here, and NaN in some libraries."""

    name: str
    x: torch.Tensor
    made: Quantized
    by: Quantizer
    values: torch.Tensor
    channels: int
    has_zero_block: bool = False


def quantize_part(
    roles: Roles, args: Sequence[Any], position: int, by: Quantizer, span: tuple[float, float] | None = None
) -> Part:
    """Quantize a layer's weight or input, which is `args[position]`. span: range of calibration inputs. Every expert in a
    stack is quantized by itself."""
    is_weight = position == roles.weight
    channels = roles.summed if is_weight else roles.given_summed
    moved = args[position].movedim(channels, -1)  # [*, channels]
    is_one_weight = is_weight and not roles.stacked
    x = moved.flatten(1) if is_one_weight else moved.reshape(-1, moved.shape[-1])
    scales_cross_rows = by.block[0] != 1 or by.rule == "e4m3_two_levels"
    if is_weight and roles.stacked and moved.dim() == 3 and scales_cross_rows:
        made = _join([fake_quantize(expert, by) for expert in moved])
    else:
        made = fake_quantize(x, by, span if by.calibrated else None)
    without_scale = made.values.isnan() & (x == 0)  # 0 / 0: libraries with a lower bound of the scale give 0
    has_zero_block = bool(without_scale.any())
    if has_zero_block:
        made = replace(made, values=made.values.masked_fill(without_scale, 0.0))
    name = "weight" if is_weight else "activation"
    values = made.values.view(moved.shape).movedim(-1, channels)
    return Part(name, x, made, by, values, moved.shape[-1], has_zero_block)


def _join(parts: Sequence[Quantized]) -> Quantized:
    """Matrices [rows, columns] below each other."""
    return Quantized(
        torch.cat([part.values for part in parts]),
        torch.cat([part.beyond for part in parts]),
        torch.cat([part.vanished for part in parts]),
    )


Changes = list[tuple[Part, torch.Tensor]]
"""The weight, and the input if it is quantized too, each with the change of the layer's result that it adds."""


class QuantizedLayers:
    """Runs layers under quantization schemes. values: FP32 results by name. spans: results of `spans_of`."""

    def __init__(
        self,
        capture: Capture,
        values: Mapping[str, Any],
        schemes: tuple[str, ...] = (),
        spans: Mapping[str, tuple[float, float]] | None = None,
    ) -> None:
        self.schemes, self.layers = schemes, layers_of(capture) if schemes else {}
        self._values, self._spans = values, spans or {}

    def errors(self, name: str) -> Iterator[tuple[str, str, torch.Tensor]]:
        """Yield (scheme, kind, error of the result). Kinds: "own", only the weight quantized; "cast", only the input;
        "isolated", both."""
        for scheme in self.schemes if name in self.layers else ():
            parts = self.run(name, scheme)
            for kind, (_, error) in zip(("own", "cast"), parts, strict=False):
                yield scheme, kind, error
            yield scheme, "isolated", together(parts)

    def value_of(self, n: fx.Node | None) -> torch.Tensor:
        """The FP32 result of an operation, or a parameter or input."""
        assert n is not None
        value: torch.Tensor = self._values[n.name]
        return value

    def run(self, name: str, scheme: str, factors: torch.Tensor | None = None) -> Changes:
        """Run a layer in FP32 on its quantized weight, then also on its quantized input, if the scheme has one. factors:
        [channels] of a linear layer; its input is divided by them before, and its weight multiplied."""
        layer = self.layers[name]
        roles = layer.roles
        before = self._values[name]
        given, kwargs = fx.node.map_arg((layer.node.args, layer.node.kwargs), lambda n: self._values[n.name])
        args = [*given]
        span = self._spans.get(layer.key)
        if factors is not None and roles.given is not None:
            smooth = self.value_of(layer.given) / factors
            weight = self.value_of(layer.weight).movedim(roles.summed, -1) * factors
            args[roles.given] = smooth
            args[roles.weight] = weight.movedim(-1, roles.summed)
            span = (float(smooth.min()), float(smooth.max()))
        changes = Changes()
        for position, by in roles.quantizers(scheme):
            part = quantize_part(roles, args, position, by, span)
            args[position] = part.values
            after = target_of(layer.node)(*args, **kwargs)
            changes.append((part, after - before))
            before = after
        return changes

    def cause(self, name: str, part: Part, error: torch.Tensor) -> tuple[str, str]:
        """The cause of the error in a layer's weight or input (see QuantizedLayer.cause), and its place in words."""
        made = part.made
        is_weight = part.name == "weight"
        if not made.values.isfinite().all():
            return "range", "a value is Inf or NaN"
        within = self._worst_slice(name, error) if is_weight else ""
        channels = _outliers(part)
        if channels:
            numbers = f"input {_list_numbers('channel', channels)}"
            if is_weight and self._is_grouped(name):
                numbers += " of each group"
            return "outlier channel", ", ".join(filter(None, (numbers, within)))
        rows = _outliers(part, axis=0)
        if rows:
            noun = "output channel" if is_weight else "row"
            return "outlier row", _list_numbers(noun, rows)
        if within:
            return "slice", within
        if is_weight:
            ranges = _unequal_ranges(part)
            if ranges:
                return "unequal channels", ranges
        squares = (made.values - part.x).square()
        out_of_range = float(squares[made.vanished | made.beyond].sum())
        is_range = out_of_range >= float(squares.sum()) / 2 > 0
        return "range" if is_range else "rounding", ""

    def _is_grouped(self, name: str) -> bool:
        """Whether a layer is a convolution of several groups, whose weight has the input channels of one group."""
        layer = self.layers[name]
        roles = layer.roles
        if layer.given is None or not roles.spatial or not roles.summed:  # a transposed weight has all input channels
            return False
        sizes = shape(layer.given)
        return sizes[len(sizes) - 1 - roles.spatial] > shape(layer.weight)[roles.summed]

    def _worst_slice(self, name: str, error: torch.Tensor) -> str:
        """The slice of a fused weight whose results have a much larger relative error than all others; "" if none."""
        reference = self._values[name]
        bounds = _slices(self.layers[name].node)
        relative = list[float]()
        for low, high in bounds:
            norm = reference[..., low:high].norm().clamp(min=1e-30)
            relative.append(float(error[..., low:high].norm() / norm))
        *others, worst = sorted(relative) or [0.0]
        if not others or not worst >= _WORSE_SLICE * others[-1]:
            return ""
        number = relative.index(worst)
        low, high = bounds[number]
        return f"slice {number + 1} of {len(bounds)}, output channels {low} to {high - 1}"


def together(parts: Changes) -> torch.Tensor:
    """The change of the layer's result by quantization of weight and input."""
    return reduce(torch.add, (error for _, error in parts))


def _outliers(part: Part, axis: int = 1) -> list[int]:
    """Channels (axis 0: rows) far larger than all others, whose removal makes the error of all other entries much
    smaller."""
    x = part.x
    largest = x.abs().amax(1 - axis)
    if axis == 1:
        largest = largest.view(-1, part.channels).amax(0)  # [kernel positions * channels] -> [channels]
    most = _MOST_OUTLIERS
    if axis == 0:
        most = max(_MOST_OUTLIERS, len(largest) // 2)
    chosen = _far_larger(largest, most)
    if not chosen or len(chosen) == len(largest):
        return []
    repeats = x.shape[axis] // len(largest)
    columns = [channel + len(largest) * repeat for repeat in range(repeats) for channel in chosen]
    removed = torch.tensor(columns, device=x.device)

    def error_of_others(values: torch.Tensor) -> float:
        return float((values - x).index_fill(axis, removed, 0.0).norm())

    eased = fake_quantize(x.index_fill(axis, removed, 0.0), part.by).values.nan_to_num()
    helps = error_of_others(eased) <= _EASED * error_of_others(part.made.values)
    return chosen if helps else []


def _far_larger(largest: torch.Tensor, most: int) -> list[int]:
    """Indices of the entries far above the median, and far above the next smaller entry; at most `most` of them."""
    nonzero = largest[largest > 0]
    median = nonzero.median() if len(nonzero) else largest.sum()
    order = largest.argsort(descending=True)
    ranked = largest[order].tolist()
    count = 0
    for at, (entry, smaller) in enumerate(zip(ranked[:most], [*ranked[1:], 0.0], strict=False)):
        if entry > _OUTLIER * median and entry >= _APART * smaller:
            count = at + 1
    return sorted(int(index) for index in order[:count])


def _unequal_ranges(part: Part) -> str:
    """The smallest and the largest range of a weight's output channels, in words, if they share one scale, and a scale
    per channel would make the weight's error much smaller; else ""."""
    if all(part.by.block) or part.by.block[0] == 1:
        return ""
    by_channel = fake_quantize(part.x, replace(part.by, block=(1, 0))).values.nan_to_num()
    shared, own = (float((values - part.x).norm()) for values in (part.made.values, by_channel))
    if not own <= _EASED * shared:
        return ""
    largest = part.x.abs().amax(1)
    return f"largest entries of the output channels: {float(largest.min()):.3g} to {float(largest.max()):.3g}"


def _slices(n: fx.Node) -> list[tuple[int, int]]:
    """Bounds of slices of the result's last dimension that the model reads separately; empty without such slices."""
    sizes = shape(n)
    last = len(sizes) - 1
    length = sizes[-1]
    bounds = set[tuple[int, int]]()
    for user in n.users:
        kind = op_of(user).partition(".")[2].partition(".")[0]  # `split` of `aten.split.Tensor`
        values = tensors_in(user.meta.get("val"))
        if kind in _PIECES:
            lengths = [x.shape[-1] for x in values]
            if sum(lengths) == length:
                return list(pairwise(accumulate(lengths, initial=0)))
        elif kind == "slice" and user.args[1] in (-1, last):
            ends = [min(x, length) for x in user.args[2:4] if isinstance(x, int)]
            if len(ends) == 2:
                bounds.add((ends[0], ends[1]))
        elif kind in _SPLITTING_VIEWS and values and values[0].dim() > len(sizes):
            parts = values[0].shape[last]  # [.., 3, heads, d]: query, key and value
            if parts in (2, 3):
                return [(i * length // parts, (i + 1) * length // parts) for i in range(parts)]
    return sorted(bounds) if len(bounds) > 1 else []


def _list_numbers(noun: str, numbers: list[int]) -> str:
    listed = ", ".join(map(str, numbers[:_LISTED]))
    more = f" and {len(numbers) - _LISTED} more" if len(numbers) > _LISTED else ""
    return f"{noun}{'s' * (len(numbers) > 1)} {listed}{more}"
