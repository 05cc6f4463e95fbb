"""What a forward pass keeps in memory under a choice of precisions: the weights, and the activations alive at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import fx

from ..formats.table import FORMATS, is_low
from ..ops.nodes import tensors_of
from ..records import Capture, Memory
from ..replay.resolve import Resolution
from .costs import Cost


def memory_of(capture: Capture, costs: Mapping[str, Cost], resolution: Resolution, format: str) -> Memory:
    """Bytes of parameters and buffers, and the most that inputs, activations and cast copies take together.

    Inference: a value is freed after its last reader. A view takes none of its own; a copy that autocast or a boundary
    makes in the low format lives while its reader runs. What kernels allocate for themselves is not known.
    """
    nodes = list(capture.graph_module.graph.nodes)
    size = {node.name: _bytes(node, resolution.dtypes.get(node.name, "")) for node in nodes}
    inputs = {placeholder.name for placeholder in capture.placeholders if placeholder.kind == "input"}
    weights = sum(size[p.name] for p in capture.placeholders if p.name not in inputs)
    held = {node.name: _holder(node, costs) for node in nodes}
    last = {held[source.name]: index for index, node in enumerate(nodes) for source in node.all_input_nodes}
    copies = _copies(nodes, resolution, FORMATS[format].bytes)
    alive = peak = sum(size[name] for name in inputs)
    for index, node in enumerate(nodes):
        if node.op != "call_function":
            continue
        alive += size[node.name] if held[node.name] == node.name else 0
        peak = max(peak, alive + copies.get(node.name, 0))
        done = {held[source.name] for source in node.all_input_nodes} | {held[node.name]}
        alive -= sum(size[name] for name in done if last.get(name, index) == index and name in capture.nodes)
    return Memory(weights, peak)


def _holder(node: fx.Node, costs: Mapping[str, Cost]) -> str:
    """The node whose storage a node's value lies in: its own, or that of what it is a view of."""
    while node.name in costs and costs[node.name].free and node.args and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node.name


def _copies(nodes: list[fx.Node], resolution: Resolution, size: int) -> dict[str, int]:
    """{node: bytes of the low copies that are made of what it reads}. size: of one low element."""
    elements = {node.name: sum(x.numel() for x in _floats(node)) for node in nodes}
    found: dict[str, int] = {}
    for value, readers in resolution.lowered.items():
        for reader in readers:
            found[reader] = found.get(reader, 0) + size * elements[value]
    return found


def _bytes(node: fx.Node, dtype: str) -> int:
    floats = sum(x.numel() * (FORMATS[dtype].bytes if dtype in FORMATS else x.element_size()) for x in _floats(node))
    return floats + sum(x.numel() * x.element_size() for x in tensors_of(node.meta.get("val")) if not _is_float(x))


def _floats(node: fx.Node) -> Iterator[torch.Tensor]:
    return (x for x in tensors_of(node.meta.get("val")) if _is_float(x))


def _is_float(x: torch.Tensor) -> bool:
    return x.dtype is torch.float32 or is_low(x.dtype)
