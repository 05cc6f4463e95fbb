"""Linear layers, convolutions and embeddings with quantized weights and inputs: results, errors, and what causes them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import fx

from ..execution.execute import Executor
from ..numerics.entries import finite
from ..numerics.nodes import op_of, target_of, tensors_in, view_source
from ..numerics.quantize import Quantized, fake_quantize
from ..numerics.schemes import SCHEMES, Quantizer
from ..records import Batch, Capture, Subject

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
"""A channel may be an outlier if its largest magnitude is this many times the median of all; at most this many."""

_EASED = 0.5
"""Outliers are the cause if the error of all other entries falls to this share without them."""

_WORSE_SLICE = 3.0
"""A slice is the cause if its relative error is this many times that of every other slice."""

_PIECES = ("split", "split_with_sizes", "chunk", "unsafe_split", "unsafe_chunk")


@dataclass(frozen=True)
class Layer:
    """A layer with a weight. given: its input; None for an embedding. summed: the weight's dimension that is summed
    over; spatial: number of dimensions of a convolution's kernel."""

    node: fx.Node
    given: fx.Node | None
    weight: fx.Node
    summed: int
    spatial: int


def layers_of(capture: Capture) -> dict[str, Layer]:
    """The layers whose weight is a parameter, or a view of one, by name of the operation."""
    parameters = {place.name for place in capture.placeholders if place.kind in ("parameter", "buffer")}
    result = {}
    for n in capture.graph_module.graph.nodes:
        name = op_of(n).split(".")[1] if op_of(n).startswith("aten.") else ""
        if n.op != "call_function" or name not in _ARGUMENTS:
            continue
        at, of, summed = _ARGUMENTS[name]
        given, weight = None if at is None else n.args[at], n.args[of]
        root = weight
        while (source := view_source(root)) is not None:
            root = source
        shape = weight.meta["val"].shape
        if root.name in parameters and len(shape) > 1:
            convolves = "conv" in name
            transposed = name == "convolution" and bool(n.args[6])
            result[n.name] = Layer(n, given, weight, 0 if transposed else summed, len(shape) - 2 if convolves else 0)
    return result


def calibration_spans(capture: Capture, subject: Subject, batches: Iterable[Batch]) -> dict[str, tuple[float, float]]:
    """{layer: smallest and largest value of its input} over the batches, for scales that are fixed by calibration."""
    layers, result = layers_of(capture), dict[str, tuple[float, float]]()
    readers: dict[str, list[str]] = {}
    for name, layer in layers.items():
        if layer.given is not None:
            readers.setdefault(layer.given.name, []).append(name)
    with torch.no_grad():
        for batch in batches:
            for n, value in Executor(capture.graph_module).steps(*capture.bind(subject.model, batch)):
                for name in readers.get(n.name, ()):
                    low, high = (float(x) for x in finite(tensors_in(value)[0]).float().aminmax())
                    least, most = result.get(name, (low, high))
                    result[name] = min(low, least), max(high, most)
    return result


@dataclass(frozen=True)
class Cause:
    """Why a layer's error is large. part: "weight" or "activation"; kind: see QuantizedLayer.cause; place: the outlier
    channels or the slice, in words."""

    part: str
    kind: str
    place: str = ""


@dataclass(frozen=True)
class Parts:
    """A layer under a scheme: weight and input as matrices [rows, channels], and what quantization makes of them.

    result: with both quantized; weight_error, input_error: what each changes of the result.
    """

    weight: torch.Tensor
    quantized_weight: Quantized
    given: torch.Tensor | None
    quantized_input: Quantized | None
    result: torch.Tensor
    weight_error: torch.Tensor
    input_error: torch.Tensor | None

    @property
    def error(self) -> torch.Tensor:
        """What quantization changes of the result."""
        return self.weight_error if self.input_error is None else self.weight_error + self.input_error


class QuantizedLayers:
    """Runs layers under schemes. values: FP32 results by name. spans: ranges of inputs, see `calibration_spans`."""

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
        """Yield (scheme, kind, error of the result): "isolated" of weight and input together, "own" of the weight alone,
        "cast" of the input alone."""
        for scheme in self.schemes if name in self.layers else ():
            parts = self.run(name, scheme)
            yield scheme, "isolated", parts.error
            yield scheme, "own", parts.weight_error
            if parts.input_error is not None:
                yield scheme, "cast", parts.input_error

    def run(self, name: str, scheme: str) -> Parts:
        """Run a layer in FP32 on its quantized weight and input."""
        layer, row, reference = self.layers[name], SCHEMES[scheme], self._values[name]
        weight = self._values[layer.weight.name]
        moved = weight.movedim(layer.summed, -1)  # [out, *kernel, in]
        made = fake_quantize(moved.flatten(1), row.weight)
        lowered = made.values.view(moved.shape).movedim(-1, layer.summed)
        by_weight = self._result(layer, lowered) - reference
        given, by = None if layer.given is None else self._values[layer.given.name], row.activation
        if given is None or by is None:
            return Parts(moved.flatten(1), made, None, None, reference + by_weight, by_weight, None)
        channels = given.dim() - 1 - layer.spatial
        rows = given.movedim(channels, -1)
        quantized = fake_quantize(rows, _for_layer(by, layer), self._span(name, given, by))
        result = self._result(layer, lowered, quantized.values.movedim(-1, channels))
        flat = Quantized(*(x.reshape(-1, x.shape[-1]) for x in vars(quantized).values()))
        return Parts(
            moved.flatten(1),
            made,
            rows.reshape(-1, rows.shape[-1]),
            flat,
            result,
            by_weight,
            result - reference - by_weight,
        )

    def cause(self, name: str, scheme: str, parts: Parts, part: str) -> Cause:
        """What makes the error of the weight or the input large: outlier channels, a slice of a fused weight, values out
        of the elements' range, or else rounding."""
        layer, row = self.layers[name], SCHEMES[scheme]
        if part == "weight":
            x, made, by = parts.weight, parts.quantized_weight, row.weight
        else:
            assert parts.given is not None and parts.quantized_input is not None and row.activation is not None
            x, made, by = parts.given, parts.quantized_input, _for_layer(row.activation, layer)
        if not made.values.isfinite().all():
            return Cause(part, "range", "a block of zeros has scale 0")
        within = self._worst_slice(layer, parts) if part == "weight" else ""
        if channels := _outliers(x, made.values, by):
            places = (f"input {_listed('channel', channels)}", within)
            return Cause(part, "outlier channel", ", ".join(filter(None, places)))
        if rows := _outliers(x, made.values, by, rows=True):
            return Cause(part, "outlier row", _listed("output channel" if part == "weight" else "row", rows))
        if within:
            return Cause(part, "slice", within)
        squared = (made.values - x).square()
        lost = float(squared[made.vanished | made.beyond].sum()) >= float(squared.sum()) / 2 > 0
        return Cause(part, "range" if lost else "rounding")

    def _result(self, layer: Layer, weight: torch.Tensor, given: torch.Tensor | None = None) -> torch.Tensor:
        """The layer's result in FP32 with another weight and input."""
        swapped = {layer.weight: weight} | (
            {layer.given: given} if layer.given is not None and given is not None else {}
        )
        args, kwargs = fx.node.map_arg(
            (layer.node.args, layer.node.kwargs), lambda n: swapped[n] if n in swapped else self._values[n.name]
        )
        result: torch.Tensor = target_of(layer.node)(*args, **kwargs)
        return result

    def _span(self, name: str, given: torch.Tensor, by: Quantizer) -> tuple[float, float] | None:
        if not by.calibrated:
            return None
        low, high = given.aminmax()
        return self._spans.get(name, (float(low), float(high)))

    def _worst_slice(self, layer: Layer, parts: Parts) -> str:
        """The slice of a fused weight whose results have a much larger relative error than all others; "" if none."""
        bounds = _slices(layer.node)
        reference = parts.result - parts.error
        relative = [
            float(parts.weight_error[..., i:j].norm() / reference[..., i:j].norm().clamp(min=1e-30)) for i, j in bounds
        ]
        *others, worst = sorted(relative) or [0.0]
        if not others or not worst >= _WORSE_SLICE * others[-1]:
            return ""
        number = relative.index(worst)
        low, high = bounds[number]
        return f"slice {number + 1} of {len(bounds)}, output channels {low} to {high - 1}"


def _for_layer(by: Quantizer, layer: Layer) -> Quantizer:
    """A convolution sums over positions too, which a scale per row does not factor out of: it has one per tensor."""
    return replace(by, block=(0, 0)) if layer.spatial and by.block == (1, 0) else by


def _outliers(x: torch.Tensor, values: torch.Tensor, by: Quantizer, rows: bool = False) -> list[int]:
    """Channels of x [rows, channels] without which the error of all other entries is much smaller; or rows."""
    axis = 0 if rows else 1
    largest = x.abs().amax(1 - axis)
    median = largest[largest > 0].median() if (largest > 0).any() else largest.sum()
    order = largest.argsort(descending=True)[:_MOST_OUTLIERS]
    chosen = sorted(int(i) for i in order if largest[i] > _OUTLIER * median)
    if not chosen or len(chosen) == x.shape[axis]:
        return []
    picked = torch.tensor(chosen, device=x.device)
    eased = fake_quantize(x.index_fill(axis, picked, 0.0), by).values
    before, after = (float((y - x).index_fill(axis, picked, 0.0).norm()) for y in (values, eased))
    return chosen if after <= _EASED * before else []


def _slices(n: fx.Node) -> list[tuple[int, int]]:
    """Bounds of the slices of the result's last dimension that the model reads separately; empty if it reads it whole."""
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
