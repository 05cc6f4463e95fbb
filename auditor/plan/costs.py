"""Costs of every node in every precision (FLOPs, bytes, time), and peak memory of a forward pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from ..execution.resolve import Resolution
from ..numerics.flops import flops_of
from ..numerics.formats import FORMATS, is_low
from ..numerics.nodes import row_of, tensors_in
from ..numerics.schemes import Scheme
from ..records import Capture, MemoryUse
from ..resources import table

TIE = 1e-3
"""Weight of predicted time in the objectives `memory` and `flops`, so that of otherwise equal plans the fastest
wins."""


def memory_of(capture: Capture, costs: Mapping[str, Cost], resolution: Resolution, format: str) -> MemoryUse:
    """Memory of one forward: bytes of parameters and buffers, and peak bytes of inputs, activations and cast copies.

    As in inference, a value is freed after the last operation that reads it. A view takes no memory. A low-precision
    copy made by autocast or a scope is alive only while the operation that reads it runs. Memory that kernels allocate
    internally is not counted. If the model has several paths, each number is the largest of any path.
    """
    if capture.paths:
        uses = [memory_of(path.capture, costs, resolution, format) for path in capture.paths]
        return MemoryUse(max(use.weights for use in uses), max(use.activations for use in uses))
    nodes = list(capture.graph_module.graph.nodes)
    size = dict[str, int]()
    copies = Counter[str]()  # {node: bytes of casts that only this node reads}
    for node in nodes:
        size[node.name] = _bytes_of_result(node, resolution)
        for reader in resolution.readers_of_rounded.get(node.name, ()):
            copies[reader] += FORMATS[format].bytes * elements_of(node)
    inputs = {placeholder.name for placeholder in capture.placeholders if placeholder.kind == "input"}
    weights = sum(size[placeholder.name] for placeholder in capture.placeholders if placeholder.name not in inputs)
    free = {name for name, cost in costs.items() if cost.free}
    return MemoryUse(weights, most_alive(nodes, size, free, inputs, copies))


def _bytes_of_result(node: fx.Node, resolution: Resolution) -> int:
    """Bytes of a node's tensors, with FP32 and low-precision ones in the format that the plan gives them."""
    planned = FORMATS.get(resolution.dtypes.get(node.name, ""))
    total = 0
    for x in tensors_in(node.meta.get("val")):
        bytes_each = x.itemsize
        if planned is not None and (x.dtype is torch.float32 or is_low(x.dtype)):
            bytes_each = planned.bytes
        total += x.numel() * bytes_each
    return total


def most_alive(
    nodes: Sequence[fx.Node],
    size: Mapping[str, int],
    free: Collection[str],
    inputs: Collection[str],
    copies: Mapping[str, int],
) -> int:
    """Peak bytes of inputs, results and copies that are alive at the same time while nodes run in order.

    size: {node: bytes of its result}. free: nodes that return views. inputs: nodes alive from the start. copies: {node:
    bytes of casts that only this node reads}.
    """
    owner = dict[str, str]()  # {node: the node whose storage contains its value}
    for node in nodes:
        viewed = node.args[0] if node.name in free and node.args else None
        owner[node.name] = owner[viewed.name] if isinstance(viewed, fx.Node) else node.name
    last_read = dict[str, int]()  # {owner of a storage: index of its last reader}
    for index, node in enumerate(nodes):
        for source in node.all_input_nodes:
            last_read[owner[source.name]] = index
    computed = {node.name for node in nodes if node.op == "call_function"}
    alive = sum(size[name] for name in inputs)
    peak = alive
    for index, node in enumerate(nodes):
        if node.name not in computed:
            continue
        own = owner[node.name]
        if own == node.name:
            alive += size[own]
        peak = max(peak, alive + copies.get(node.name, 0))
        storages = {owner[source.name] for source in node.all_input_nodes} | {own}
        for name in storages:
            is_read_later = last_read.get(name, index) != index
            if name in computed and not is_read_later:
                alive -= size[name]
    return peak


def elements_of(node: fx.Node) -> int:
    """Number of floating-point elements in a node's result."""
    return sum(x.numel() for x in tensors_in(node.meta.get("val")) if x.is_floating_point())


@dataclass(frozen=True)
class Cost:
    """Cost of a node. flops: a multiply-add counts as two. elements: floating-point numbers read and written. free:
    whether the node only returns a view."""

    flops: int
    elements: int
    free: bool


def costs_of(graph: fx.Graph) -> dict[str, Cost]:
    """{node: its Cost}, computed from the recorded shapes."""
    return {
        node.name: Cost(flops_of(node), _elements_moved(node), _is_free(node))
        for node in graph.nodes
        if node.op == "call_function"
    }


def _elements_moved(node: fx.Node) -> int:
    """Number of floating-point elements that a node reads and writes: `x.new_zeros(n)` reads none of `x`."""
    read = () if row_of(node).asks_shape else node.all_input_nodes
    return sum(map(elements_of, (*read, node)))


def _is_free(node: fx.Node) -> bool:
    """Whether a node's result is a view of its first argument; for a reshape, whether the strides allow a view."""
    how, values = row_of(node).view, [tensors_in(n.meta.get("val")) for n in (*node.all_input_nodes[:1], node)]
    if how == "if_strides_allow" and len(values) == 2 and all(values):
        try:
            values[0][0].view(values[1][0].shape)
        except RuntimeError:
            return False
    return how in ("always", "if_strides_allow")


def seconds(cost: Cost, precision: str, device: str) -> float:
    """Roofline time of one node in seconds: of its arithmetic or its memory traffic, whichever is longer."""
    if cost.free:
        return 0.0
    peaks, row = table("plan/devices")[device], FORMATS[precision]
    arithmetic = cost.flops / (peaks.get(row.speed or "", peaks["fp32"]) * 1e12)
    return max(arithmetic, traffic_seconds(cost.elements * row.bytes, device))


def half_of(device: str) -> str:
    """The 16-bit format in which a device computes unquantized layers: BF16, or FP16 if the device lacks BF16."""
    return "bf16" if "bf16" in table("plan/devices")[device] else "fp16"


def quantized_seconds(cost: Cost, weights: int, scheme: Scheme, device: str) -> float:
    """Roofline seconds of a layer under a quantization scheme; activations take 16 bits. weights: number of weights.

    The layer computes in 16 bits if the scheme only quantizes weights, or if the device cannot multiply in its format.
    """
    peaks = table("plan/devices")[device]
    arithmetic = cost.flops / (peaks.get(scheme.products, peaks[half_of(device)]) * 1e12)
    return max(arithmetic, traffic_seconds(weights * scheme.weight.bits / 8 + (cost.elements - weights) * 2, device))


def traffic_seconds(bytes: float, device: str) -> float:
    """Time in seconds to transfer `bytes` once at the device's memory bandwidth."""
    return bytes / (float(table("plan/devices")[device]["bandwidth"]) * 1e9)


def cast_seconds(elements: int, format: str, device: str) -> float:
    """Time in seconds to read `elements` in FP32 and write them in `format`, or the reverse."""
    return traffic_seconds(elements * (FORMATS["fp32"].bytes + FORMATS[format].bytes), device)


def price(objective: str, cost: Cost, elements: int, precision: str, device: str) -> float:
    """Price of one node under the objective, in seconds. elements: floating-point elements in the node's result."""
    elapsed = seconds(cost, precision, device)
    if objective == "time":
        return elapsed
    if objective == "flops":
        own = 0.0 if FORMATS[precision].low else seconds(Cost(cost.flops, 0, False), "fp32", device)
    else:
        own = 0.0 if cost.free else traffic_seconds(FORMATS[precision].bytes * elements, device)
    return own + TIE * elapsed
