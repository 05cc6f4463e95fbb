"""Which nodes the author keeps in FP32: those that compute on a value cast up, until it is cast back.

In the graph of an FP32 model a cast up and a cast back look the same, both go from float32 to float32. What tells them
apart is the trace of the same model in a low format: there a cast back goes to that format, a cast up does not.
"""

from __future__ import annotations

import re

import torch
from torch import fx

from ..records import Capture
from .graph import CASTS, PRODUCTS, SHAPE_ONLY, arguments, dtype, op_of, packet, shape

_NAMES_FP32 = re.compile(r"\.float\(\)|\.double\(\)|float32|float64|torch\.float\b")
_HIGH = (torch.float32, torch.float64)


class Upcasts:
    """Where in a capture values are high by the author's word. nodes: operations, casts aside, on such values.

    A product reads raised values, but hands none on unless autocast is off around it: autocast lowers its inputs.
    """

    def __init__(self, capture: Capture) -> None:
        self._followers = _followers(capture)
        self._high: dict[fx.Node, bool] = {}
        for node in capture.graph_module.graph.nodes:
            lowered = packet(op_of(node)) in PRODUCTS and autocast_on(capture, node.name)
            self._high[node] = self._is_high(node) and not lowered
        self.nodes = frozenset(
            node.name
            for node in self._high
            if node.op == "call_function" and packet(op_of(node)) not in CASTS and self._is_high(node)
        )

    def casts_up_input(self, node: fx.Node) -> bool:
        """Whether one of the node's inputs is a cast up, reshapes aside."""
        return node.name in self.nodes and any(self._is_cast_up(item) for item in node.all_input_nodes)

    def _is_high(self, node: fx.Node) -> bool:
        if node.op != "call_function":
            return False
        if packet(op_of(node)) in CASTS:
            return self._raises(node)
        if not node.all_input_nodes:
            return self._is_made_high(node)
        return self._asks_for_high(node) or any(self._high[item] for item in node.all_input_nodes)

    def _is_made_high(self, node: fx.Node) -> bool:
        """Whether a tensor out of nothing is FP32 whatever the model's format; a scalar promotes nothing."""
        known = self._followers is not None and node.name not in self._followers
        return known and dtype(node) in _HIGH and shape(node) != ()

    def _asks_for_high(self, node: fx.Node) -> bool:
        return arguments(node).get("dtype") in _HIGH and node.name not in (self._followers or ())

    def _raises(self, node: fx.Node) -> bool:
        if dtype(node) not in _HIGH:
            return False
        if self._followers is not None:
            return node.name not in self._followers
        # No low trace exists: the line of source says what was meant, and a value that is high is lowered by a cast.
        text = ((node.meta.get("stack_trace") or "").strip().splitlines() or [""])[-1]
        return _NAMES_FP32.search(text) is not None and not self._high[node.all_input_nodes[0]]

    def _is_cast_up(self, node: fx.Node) -> bool:
        while packet(op_of(node)) in SHAPE_ONLY and node.all_input_nodes:
            node = node.all_input_nodes[0]
        return packet(op_of(node)) in CASTS and self._raises(node)


def autocast_on(capture: Capture, name: str) -> bool:
    """Whether an ambient autocast reaches the node: no region around it switches it off."""
    return capture.regions.get(name, (True, ""))[0]


def _followers(capture: Capture) -> frozenset[str] | None:
    """Nodes with a literal that changes with the model's format; None where no low trace could be made."""
    if not capture.constants:
        return None
    return frozenset(name for nodes in capture.constants.values() for name in nodes)
