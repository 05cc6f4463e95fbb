"""Which nodes the author keeps in FP32: those that compute on a value cast up, until it is cast back.

In the graph of an FP32 model a cast up and a cast back look the same, both go from float32 to float32; the line of
source that made the cast tells them apart, and where it does not, a raised value is taken to be lowered and vice versa.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import fx

from ..records import Capture
from .graph import CASTS, PRODUCTS, SHAPE_ONLY, arguments, dtype, op_of, packet

_RAISES = re.compile(r"\.float\(\)|\.double\(\)|float32|float64|torch\.float\b")
_LOWERS = re.compile(r"\.type_as\(|\.half\(\)|\.bfloat16\(\)|float16|\.to\((?![^)]*(?:float32|float64|torch\.float\b))")
_HIGH = (torch.float32, torch.float64)


def upcast_nodes(capture: Capture) -> frozenset[str]:
    """Names of the operations, casts aside, of which the author raised an input, directly or upstream.

    A product reads raised values, but hands none on unless autocast is off around it: autocast lowers its inputs.
    """
    owners = {name: node.owner for name, node in capture.nodes.items()}
    meant: dict[fx.Node, bool] = {}  # what the author takes to be high, products included
    high: dict[fx.Node, bool] = {}  # what is
    found = set()
    for node in capture.graph_module.graph.nodes:
        read = [source for source in node.all_input_nodes if _in_reach(source, node, owners)]
        asked = bool(node.all_input_nodes) and arguments(node).get("dtype") in _HIGH
        meant[node] = asked or any(meant[source] for source in read)
        high[node] = asked or any(high[source] for source in read)
        if packet(op_of(node)) in CASTS:
            meant[node] = high[node] = _raises(node, any(meant[source] for source in read))
        elif high[node]:
            found.add(node.name)
            high[node] = packet(op_of(node)) not in PRODUCTS or not autocast_on(capture, node.name)
    return frozenset(found)


def casts_up_input(node: fx.Node, upcast: frozenset[str]) -> bool:
    """Whether an input of an upcast node is a cast, reshapes aside, that is plainly one up by its line of source."""
    return node.name in upcast and any(_is_plain(source) for source in node.all_input_nodes)


def autocast_on(capture: Capture, name: str) -> bool:
    """Whether an ambient autocast reaches the node: no region around it switches it off."""
    return capture.regions.get(name, (True, ""))[0]


def _is_plain(node: fx.Node) -> bool:
    while packet(op_of(node)) in SHAPE_ONLY and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return packet(op_of(node)) in CASTS and dtype(node) in _HIGH and _said(node) is True


def _in_reach(source: fx.Node, reader: fx.Node, owners: Mapping[str, str]) -> bool:
    """Whether `reader` can mean the cast: one that changes nothing returns its own input, so later readers of the
    input, a residual branch outside the module for one, are recorded as readers of the cast."""
    if packet(op_of(source)) not in CASTS or dtype(source) != dtype(source.all_input_nodes[0]):
        return True
    owner = owners.get(source.name, "")
    return not owner or f"{owners.get(reader.name, '')}.".startswith(f"{owner}.")


def _raises(node: fx.Node, reads_high: bool) -> bool:
    """Whether the values behind a cast are high."""
    source = node.all_input_nodes[0]
    before, after = dtype(source), dtype(node)
    if before is None or after is None or after not in _HIGH:
        return False
    said = _said(node)
    if said is not None:
        return said
    if not before.is_floating_point:
        return False
    repeated = packet(op_of(source)) in CASTS
    return before.itemsize < after.itemsize or reads_high == repeated


def _said(node: fx.Node) -> bool | None:
    """Whether the cast's line of source raises (True) or lowers (False); None where it says neither, or both."""
    text = ((node.meta.get("stack_trace") or "").strip().splitlines() or [""])[-1]
    raises, lowers = _RAISES.search(text) is not None, _LOWERS.search(text) is not None
    return raises if raises != lowers else None
