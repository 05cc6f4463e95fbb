"""Linear layers, convolutions and embeddings with quantized weights and inputs: results, errors, and their causes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import fx

from ..errors import PlanError
from ..numerics.nodes import arguments, op_of, row_of, target_of, tensors_in, view_source
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

_OUTLIER, _MOST_OUTLIERS = 4.0, 8
"""Factor by which an outlier channel's largest magnitude exceeds the channels' median; maximum number of outliers."""

_EASED = 0.5
"""Outliers count as the cause if the error of all other entries falls to this share when the outliers are removed."""

_WORSE_SLICE = 3.0
"""A slice counts as the cause if its relative error is this many times that of every other slice."""

_PIECES = ("split", "split_with_sizes", "chunk", "unsafe_split", "unsafe_chunk")


@dataclass(frozen=True)
class Layer:
    """A layer with a weight. given: the input; None for an embedding. key: the name by `key_of`. summed: the dimension
    of the weight that is summed over; spatial: number of dimensions of a convolution's kernel."""

    node: fx.Node
    given: fx.Node | None
    weight: fx.Node
    key: str
    summed: int
    spatial: int


class Roles(NamedTuple):
    """Positions of a layer's input and weight among the operation's arguments, and other fields of `Layer`."""

    given: int | None
    weight: int
    summed: int
    spatial: int


def key_of(parameter: str) -> str:
    """A layer's name: the path of the module whose `weight` the parameter is; for other parameters, their full name."""
    return "" if parameter == "weight" else parameter.removesuffix(".weight")


def roles_of(op: str, args: Sequence[Any], shape: Callable[[Any], torch.Size]) -> Roles | None:
    """Roles of an operation's arguments; None if the operation is no layer. shape: returns an argument's shape."""
    name = op.split(".")[1] if op.startswith("aten.") else ""
    if name not in _ARGUMENTS:
        return None
    given, weight, summed = _ARGUMENTS[name]
    transposed = name == "convolution" and bool(args[6])
    return Roles(given, weight, 0 if transposed else summed, len(shape(args[weight])) - 2 if "conv" in name else 0)


def layers_of(capture: Capture) -> dict[str, Layer]:
    """{operation: Layer}, for layers whose weight is a parameter or a view of a parameter."""
    names = {place.name: place.fqn or "" for place in capture.placeholders if place.kind in ("parameter", "buffer")}
    result = {}
    for n in capture.graph_module.graph.nodes:
        roles = roles_of(op_of(n), n.args, shape_of) if n.op == "call_function" else None
        if roles is None:
            continue
        root = weight = n.args[roles.weight]
        while (source := view_source(root)) is not None:
            root = source
        if root.name in names and len(shape_of(weight)) > 1:
            given = None if roles.given is None else n.args[roles.given]
            result[n.name] = Layer(n, given, weight, key_of(names[root.name]), *roles[2:])
    return result


def key_layers(capture: Capture) -> set[str]:
    """The last layers before attention's keys, of fused attention or of a matrix product of activations whose result a
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


def shape_of(n: fx.Node) -> torch.Size:
    """Shape of a node's recorded result."""
    shape: torch.Size = n.meta["val"].shape
    return shape


def require_layers(captures: Sequence[Capture], schemes: Iterable[str]) -> None:
    """Raises: PlanError(slug="no-layer") if a scheme can quantize no layer of the model."""
    layers = [layer for capture in captures for layer in layers_of(capture).values()]
    for scheme in schemes:
        if not layers:
            why = "the model has no linear layer, convolution or embedding whose weight is a parameter"
        elif not any(fits(layer, scheme) for layer in layers):
            height, width = SCHEMES[scheme].weight.block
            why = f"blocks of {height}x{width} do not divide the linear layers, and " * bool(width)
            why += f"no kernel supports the {'other ' * bool(width)}layers"
        else:
            continue
        raise PlanError(f"no layer can be quantized as `{scheme}`: {why}. Remove {scheme} from --formats", "no-layer")


def fits(layer: Layer, scheme: str) -> bool:
    """Whether kernels exist for a layer under a scheme."""
    kind = "embedding" if layer.given is None else "convolution" if layer.spatial else "linear"
    columns = shape_of(layer.weight)[layer.summed]
    return SCHEMES[scheme].fits(kind, shape_of(layer.weight).numel() // columns, columns)


@dataclass(frozen=True)
class Part:
    """The weight or input of a layer as a matrix [rows, channels], before and after quantization. error: change of the
    layer's result; for an input, with the weight already quantized."""

    name: str
    x: torch.Tensor
    made: Quantized
    by: Quantizer
    error: torch.Tensor


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
            for kind, part in zip(("own", "cast"), parts, strict=False):
                yield scheme, kind, part.error
            yield scheme, "isolated", together(parts)

    def run(self, name: str, scheme: str) -> list[Part]:
        """Run a layer in FP32 on its quantized weight, then also on its quantized input, if the scheme has one."""
        layer, row, reference = self.layers[name], SCHEMES[scheme], self._values[name]
        x, made, weight = quantize_weight(self._values[layer.weight.name], layer.summed, row.weight)
        result = self._result(layer, weight)
        parts = [Part("weight", x, made, row.weight, result - reference)]
        if layer.given is not None and row.activation is not None:
            by = for_layer(row.activation, layer.spatial)
            x, made, given = quantize_input(
                self._values[layer.given.name], layer.spatial, by, self._spans.get(layer.key)
            )
            parts.append(Part("activation", x, made, by, self._result(layer, weight, given) - result))
        return parts

    def cause(self, name: str, part: Part) -> tuple[str, str]:
        """The cause of the error in a layer's weight or input (see QuantizedLayer.cause), and its place in words."""
        made, is_weight = part.made, part.name == "weight"
        if not made.values.isfinite().all():
            return "range", "a block of zeros has scale 0"
        within = self._worst_slice(name, part) if is_weight else ""
        if channels := _outliers(part):
            return "outlier channel", ", ".join(filter(None, (f"input {_listed('channel', channels)}", within)))
        if rows := _outliers(part, axis=0):
            return "outlier row", _listed("output channel" if is_weight else "row", rows)
        if within:
            return "slice", within
        squared = (made.values - part.x).square()
        lost = float(squared[made.vanished | made.beyond].sum()) >= float(squared.sum()) / 2 > 0
        return "range" if lost else "rounding", ""

    def _result(self, layer: Layer, weight: torch.Tensor, given: torch.Tensor | None = None) -> torch.Tensor:
        """Run a layer in FP32 with another weight, and with another input if given."""
        swapped = {layer.weight: weight} | (
            {layer.given: given} if layer.given is not None and given is not None else {}
        )
        args, kwargs = fx.node.map_arg(
            (layer.node.args, layer.node.kwargs), lambda n: swapped[n] if n in swapped else self._values[n.name]
        )
        result: torch.Tensor = target_of(layer.node)(*args, **kwargs)
        return result

    def _worst_slice(self, name: str, part: Part) -> str:
        """The slice of a fused weight whose results have a much larger relative error than all others; "" if none."""
        bounds, reference = _slices(self.layers[name].node), self._values[name]
        norms = [(part.error[..., i:j].norm(), reference[..., i:j].norm().clamp(min=1e-30)) for i, j in bounds]
        relative = [float(error / norm) for error, norm in norms]
        *others, worst = sorted(relative) or [0.0]
        if not others or not worst >= _WORSE_SLICE * others[-1]:
            return ""
        low, high = bounds[number := relative.index(worst)]
        return f"slice {number + 1} of {len(bounds)}, output channels {low} to {high - 1}"


def together(parts: Sequence[Part]) -> torch.Tensor:
    """The change of the layer's result by quantization of weight and input."""
    return parts[0].error if len(parts) == 1 else parts[0].error + parts[1].error


def for_layer(by: Quantizer, spatial: int) -> Quantizer:
    """The quantizer for a layer's input: a convolution sums over positions too, so it needs one scale per tensor."""
    return replace(by, block=(0, 0)) if spatial and by.block == (1, 0) else by


QuantizedMatrix = tuple[torch.Tensor, Quantized, torch.Tensor]
"""A tensor as a matrix [rows, channels], that matrix quantized, and the quantized values in the tensor's shape."""


def quantize_weight(weight: torch.Tensor, summed: int, by: Quantizer) -> QuantizedMatrix:
    """Quantize a layer's weight, with the summed dimension as columns."""
    moved = weight.movedim(summed, -1)  # [out, *kernel, in]
    made = fake_quantize(x := moved.flatten(1), by)
    return x, made, made.values.view(moved.shape).movedim(-1, summed)


def quantize_input(
    given: torch.Tensor, spatial: int, by: Quantizer, span: tuple[float, float] | None = None
) -> QuantizedMatrix:
    """Quantize a layer's input, with channels as columns. spatial: as in Layer. span: range of calibration inputs."""
    channels = given.dim() - 1 - spatial
    moved = given.movedim(channels, -1)
    made = fake_quantize(x := moved.reshape(-1, moved.shape[-1]), by, span if by.calibrated else None)
    return x, made, made.values.view(moved.shape).movedim(-1, channels)


def _outliers(part: Part, axis: int = 1) -> list[int]:
    """Channels (axis 0: rows) whose removal makes the error of all other entries much smaller."""
    x = part.x
    largest = x.abs().amax(1 - axis)
    median = largest[largest > 0].median() if (largest > 0).any() else largest.sum()
    order = largest.argsort(descending=True)[:_MOST_OUTLIERS]
    chosen = sorted(int(i) for i in order if largest[i] > _OUTLIER * median)
    if not chosen or len(chosen) == x.shape[axis]:
        return []
    picked = torch.tensor(chosen, device=x.device)
    eased = fake_quantize(x.index_fill(axis, picked, 0.0), part.by).values
    before, after = (float((y - x).index_fill(axis, picked, 0.0).norm()) for y in (part.made.values, eased))
    return chosen if after <= _EASED * before else []


def _slices(n: fx.Node) -> list[tuple[int, int]]:
    """Bounds of slices of the result's last dimension that the model reads separately; empty without such slices."""
    shape = n.meta["val"].shape
    bounds = set[tuple[int, int]]()
    for user in n.users:
        kind, values = op_of(user).split(".")[1:2], tensors_in(user.meta.get("val"))
        if kind and kind[0] in _PIECES and sum(x.shape[-1] for x in values) == shape[-1]:
            ends = [0]
            for x in values:
                ends.append(ends[-1] + x.shape[-1])
            return list(pairwise(ends))
        if kind == ["slice"] and user.args[1] in (-1, len(shape) - 1):
            ends = [min(x, shape[-1]) for x in user.args[2:4] if isinstance(x, int)]
            bounds.update([(ends[0], ends[1])] if len(ends) == 2 else [])
        if kind in (["view"], ["reshape"], ["unflatten"]) and values and values[0].dim() > len(shape):
            parts = values[0].shape[len(shape) - 1]  # [.., 3, heads, d]: query, key and value
            if parts in (2, 3):
                return [(i * shape[-1] // parts, (i + 1) * shape[-1] // parts) for i in range(parts)]
    return sorted(bounds) if len(bounds) > 1 else []


def _listed(noun: str, numbers: list[int]) -> str:
    return f"{noun}{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"
