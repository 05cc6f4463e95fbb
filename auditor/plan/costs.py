"""What every node costs in every precision: FLOPs and bytes from its shapes, time from a device's peaks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ..formats.table import FORMATS
from ..ops.nodes import packet_name, target_of, tensors_of
from ..records import Capture
from ..resources import table

DEFAULT_DEVICE = "A100"
_FORMULAS: dict[str, Callable[..., int]] = {}
_FREE = frozenset(
    "view reshape transpose permute expand getitem select slice unsqueeze squeeze alias detach unbind split chunk t "
    "_unsafe_view flatten dropout split_with_sizes numpy_T unflatten movedim moveaxis narrow expand_as view_as reshape_as "
    "swapaxes swapdims mT mH adjoint ravel tensor_split hsplit vsplit dsplit unsafe_chunk unsafe_split diagonal unfold "
    "view_as_real view_as_complex real imag as_strided".split()
)

_MAY_COPY = frozenset("reshape flatten ravel reshape_as".split())


@dataclass(frozen=True)
class Cost:
    """flops: multiply-adds counted as two. elements: floating tensor elements read and written. free: a view."""

    flops: int
    elements: int
    free: bool


def costs_of(capture: Capture) -> dict[str, Cost]:
    """{node: Cost} from the shapes that were recorded."""
    found = {}
    for node in capture.graph_module.graph.nodes:
        if node.op == "call_function":
            name = packet_name(target_of(node)).removesuffix("_")
            read = [tensors_of(source.meta.get("val")) for source in node.all_input_nodes]
            tensors = [*(x for group in read for x in group), *tensors_of(node.meta.get("val"))]
            elements = sum(x.numel() for x in tensors if x.is_floating_point())
            found[node.name] = Cost(_flops(name, node), elements, name in _FREE and not _copies(name, node))
    return found


def _copies(name: str, node: fx.Node) -> bool:
    """Whether an operation that gives a tensor another shape has to copy it first, since no strides do."""
    sources = node.all_input_nodes if name in _MAY_COPY else []
    source = tensors_of(sources[0].meta.get("val")) if sources else []
    result = tensors_of(node.meta.get("val"))
    if not source or not result:
        return False
    try:
        source[0].view(result[0].shape)
    except RuntimeError:
        return True
    return False


def seconds(cost: Cost, precision: str, device: str = DEFAULT_DEVICE) -> float:
    """Roofline time of one node in seconds: the slower of arithmetic and memory traffic."""
    peaks: dict[str, float] = table("plan/devices")[device]
    if cost.free:
        return 0.0
    row = FORMATS[precision]
    arithmetic = cost.flops / (peaks.get(row.speed or "", peaks["fp32"]) * 1e12)
    return max(arithmetic, cost.elements * row.bytes / (peaks["bandwidth"] * 1e9))


def cast_seconds(elements: int, format: str, device: str = DEFAULT_DEVICE) -> float:
    """Time to read `elements` in FP32 and write them in a format, or the reverse."""
    return (
        elements
        * (FORMATS["fp32"].bytes + FORMATS[format].bytes)
        / (float(table("plan/devices")[device]["bandwidth"]) * 1e9)
    )


def output_elements(capture: Capture) -> Mapping[str, int]:
    """{node or placeholder: floating elements of its result}."""
    return {
        node.name: sum(x.numel() for x in tensors_of(node.meta.get("val")) if x.is_floating_point())
        for node in capture.graph_module.graph.nodes
    }


def formula(*names: str) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Register a FLOP formula for operations; the second registration of a name is refused."""

    def register(function: Callable[..., int]) -> Callable[..., int]:
        for name in names:
            if name in _FORMULAS:
                raise ValueError(f"{name} has two FLOP formulas")
            _FORMULAS[name] = function
        return function

    return register


@formula("linear", "matmul", "mm", "bmm", "mv", "dot", "inner")
def _product(out: torch.Tensor, a: torch.Tensor, *_: Any) -> int:
    return int(2 * out.numel() * a.shape[-1])  # [.., m, k] @ [k, n]


@formula("addmm", "baddbmm", "addmv", "addbmm")
def _added_product(out: torch.Tensor, _bias: torch.Tensor, a: torch.Tensor, *_: Any) -> int:
    return int(2 * out.numel() * a.shape[-1])


@formula("conv1d", "conv2d", "conv3d", "convolution", "_convolution")
def _convolution(out: torch.Tensor, _x: torch.Tensor, weight: torch.Tensor, *_: Any) -> int:
    return int(2 * out.numel() * math.prod(weight.shape[1:]))  # weight: [c_out, c_in / groups, *kernel]


@formula("conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
def _transposed_convolution(_out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, *_: Any) -> int:
    return int(2 * x.numel() * math.prod(weight.shape[1:]))  # weight: [c_in, c_out / groups, *kernel]


@formula("scaled_dot_product_attention")
def _attention(out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, *_: Any) -> int:
    return (
        2 * q.numel() * k.shape[-2] + 2 * out.numel() * k.shape[-2]
    )  # [.., s, d] @ [.., d, t], [.., s, t] @ [.., t, e]


@formula("einsum")
def _einsum(out: torch.Tensor, equation: str, operands: Any, *_: Any) -> int:
    subscripts = equation.replace(" ", "").split("->")[0].split(",")
    sizes = {s: n for names, x in zip(subscripts, operands, strict=True) for s, n in zip(names, x.shape, strict=False)}
    return int(2 * math.prod(sizes.values()))


@formula("lstm", "gru", "rnn_tanh", "rnn_relu")
def _recurrent(_out: torch.Tensor, x: torch.Tensor, _state: Any, weights: Any, *_: Any) -> int:
    steps = x.numel() // x.shape[-1]  # sequence length times batch
    return int(2 * steps * sum(w.numel() for w in weights if w.dim() == 2))


def _flops(name: str, node: fx.Node) -> int:
    function = _FORMULAS.get(name)
    out = tensors_of(node.meta.get("val"))
    if function is None or not out:
        return 0
    args = fx.node.map_arg(node.args, lambda source: source.meta.get("val"))
    return int(function(out[0], *args))
