"""Smoothing: factors move an input's large channels into the weight; an earlier norm or linear layer absorbs them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import fx

from ..numerics.metrics import output_error
from ..numerics.nodes import row_of, shape, view_source
from ..records import Capture
from .quantized import Layer, QuantizedLayers, together

ALPHAS = (0.25, 0.5, 0.75, 1.0)
"""Exponents of the factors max|x|^alpha / max|w|^(1 - alpha) that are tried. Source: Xiao et al., SmoothQuant (2022)."""

_LEAST = 1e-5
"""Lower bound of a channel's largest magnitude, relative to the largest one."""

_NORMS = ("layer_norm", "native_layer_norm", "rms_norm", "mul")
"""Operations that multiply their result by a parameter per channel."""

_LINEAR = ("linear", "addmm")


class Smoothing(NamedTuple):
    """Factors for the input of a layer. alpha: their exponent; into: path of the module that absorbs them; factors:
    [channels], by which the input is divided and the weight multiplied."""

    alpha: float
    into: str
    factors: torch.Tensor


def readers_of(layer: Layer, layers: Mapping[str, Layer]) -> list[Layer] | None:
    """All linear layers that read the layer's input; None if anything else reads it, or one of their weights."""
    if layer.given is None or layer.kind != "linear":
        return None
    root = _root(layer)
    waiting, result = [root], list[Layer]()
    while waiting:
        for user in waiting.pop().users:
            reader = layers.get(user.name)
            if reader is not None and reader.kind == "linear" and reader.given is not None and _root(reader) is root:
                if not _owns_weight(reader):
                    return None
                result.append(reader)
            elif view_source(user) is not None and shape(user)[-1:] == shape(root)[-1:]:
                waiting.append(user)
            else:
                return None
    return result


def _owns_weight(layer: Layer) -> bool:
    """Whether no other operation reads the layer's weight, as an embedding does that is tied to the head."""
    weight: fx.Node | None = layer.weight
    while weight is not None:
        if len(weight.users) > 1:
            return False
        weight = view_source(weight)
    return True


def _root(layer: Layer) -> fx.Node:
    """The value that a layer reads, before reshapes."""
    value = layer.given
    assert value is not None
    while (source := view_source(value)) is not None:
        value = source
    return value


def absorbing_module(layer: Layer, capture: Capture) -> str | None:
    """The path of the norm or linear layer whose parameters can be divided by the factors without a change of any FP32
    result; None if there is none. Of a product of two activations, such as a gate, one linear operand absorbs them."""
    root = _root(layer)
    channels = shape(root)[-1]
    if _is_absorbing(root, channels, capture):
        return capture.nodes[root.name].owner
    operands = root.all_input_nodes if row_of(root).packet == "mul" else []
    for operand in operands:
        if len(operand.users) == 1 and _is_linear(operand) and _is_absorbing(operand, channels, capture):
            return capture.nodes[operand.name].owner
    return None


def _is_linear(n: fx.Node) -> bool:
    return row_of(n).packet in _LINEAR


def _is_absorbing(n: fx.Node, channels: int, capture: Capture) -> bool:
    """Whether an operation multiplies each channel of its result by parameters that no other operation reads."""
    if n.name not in capture.nodes or row_of(n).packet not in (*_NORMS, *_LINEAR):
        return False
    parameters = {place.name for place in capture.placeholders if place.kind == "parameter"}
    own = [source for source in n.all_input_nodes if source.name in parameters]
    if not own or any(len(source.users) > 1 for source in own):
        return False
    return _is_linear(n) or all(tuple(shape(source)) == (channels,) for source in own)


def smoothings(quantized: QuantizedLayers, capture: Capture, name: str) -> Iterator[Smoothing]:
    """The smoothings of a layer that can be folded into an earlier module, one for each of ALPHAS."""
    layer = quantized.layers[name]
    readers = readers_of(layer, quantized.layers)
    into = absorbing_module(layer, capture) if readers else None
    if readers is None or into is None:
        return
    x = quantized.value_of(layer.given)
    inputs = _largest(x.reshape(-1, x.shape[-1]))
    weights = torch.stack([_largest_of_weight(quantized, reader) for reader in readers]).amax(0)
    for alpha in ALPHAS:
        factors = inputs**alpha / weights ** (1 - alpha)
        yield Smoothing(alpha, into, factors / factors.log().mean().exp())


def _largest_of_weight(quantized: QuantizedLayers, layer: Layer) -> torch.Tensor:
    """Largest magnitude of each input channel of a layer's weight: [channels]."""
    weight = quantized.value_of(layer.weight).movedim(layer.roles.summed, -1)
    return _largest(weight.reshape(-1, weight.shape[-1]))


def _largest(x: torch.Tensor) -> torch.Tensor:
    """Largest magnitude of each column of a matrix [rows, channels], at least a small share of the largest one."""
    largest = x.detach().abs().amax(0)
    return largest.clamp(min=float(largest.max()) * _LEAST + torch.finfo(torch.float32).tiny)


def best_smoothing(
    quantized: QuantizedLayers, capture: Capture, name: str, scheme: str
) -> tuple[Smoothing, torch.Tensor] | None:
    """The smoothing with the smallest error of the layer's own result, and the change of this result; None if no earlier
    module absorbs the factors."""
    reference = quantized.value_of(quantized.layers[name].node)
    best = None
    least = torch.inf
    for one in smoothings(quantized, capture, name):
        change = together(quantized.run(name, scheme, one.factors))
        error = output_error([reference], [reference + change])
        if error < least:
            best, least = (one, change), error
    return best
