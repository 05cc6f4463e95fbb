"""Where an operation computes low, under autocast or in a model cast as a whole, and which ones the author keeps in FP32.

In the graph of an FP32 model a cast up and a cast back look the same, both go from float32 to float32. What tells them
apart is a run of the same model in a low format: there a cast back goes to that format, a cast up does not.
"""

from __future__ import annotations

import re

import torch
from torch import fx

from ..numerics.nodes import arguments, dtype, row_of, shape
from ..records import Capture

_RAISES = re.compile(r"\.float\(\)|\.double\(\)|float32|float64|torch\.float\b")
_LOWERS = re.compile(r"\.type_as\(|\.to\((?!(?:dtype=)?torch\.)")
_HIGH = (torch.float32, torch.float64)


class Upcasts:
    """Where in a capture values are high by the author's word. nodes: operations, casts aside, on such values.

    What autocast lowers, such as a product, reads raised values but hands none on, unless autocast is off around it.
    """

    def __init__(self, capture: Capture) -> None:
        self._capture, self._followers = capture, _followers(capture)
        self._high: dict[fx.Node, bool] = {}
        for node in capture.graph_module.graph.nodes:
            lowered = row_of(node).autocast == "lower" and autocast_on(capture, node.name)
            self._high[node] = self._is_high(node) and not lowered
        self.nodes = frozenset(node.name for node in self._high if self._computes_high(node))

    def casts_up(self, node: fx.Node) -> bool:
        """Whether the node itself makes FP32 out of what it reads, or out of nothing."""
        makes = row_of(node).cast or not node.all_input_nodes
        return makes and self._is_high(node)

    def casts_up_input(self, node: fx.Node) -> bool:
        """Whether one of the node's inputs is a cast up, reshapes aside."""
        return node.name in self.nodes and any(self._is_cast_up(item) for item in node.all_input_nodes)

    def _is_high(self, node: fx.Node) -> bool:
        if node.op != "call_function":
            return False
        if row_of(node).cast:
            return self._raises(node)
        if not node.all_input_nodes or _is_made_of_integers(node):
            return self._is_made_high(node)
        return self._asks_for_high(node) or any(self._hands_on(item, node) for item in node.all_input_nodes)

    def _hands_on(self, node: fx.Node, reader: fx.Node) -> bool:
        """Whether the reader computes high because of this input; a tensor out of nothing takes part in promotion only."""
        origin = _unshaped(node)
        out_of_nothing = origin.op == "call_function" and (not origin.all_input_nodes or _is_made_of_integers(origin))
        return self._high[node] and (not out_of_nothing or _promotes(reader) or self._reads_nothing_else(reader))

    def _reads_nothing_else(self, reader: fx.Node) -> bool:
        """Whether all floating values that it reads are high, so that no other dtype can be the one it takes."""
        held = [(item, dtype(item)) for item in reader.all_input_nodes]
        return all(self._high[item] for item, found in held if found is not None and found.is_floating_point)

    def _computes_high(self, node: fx.Node) -> bool:
        if not row_of(node).cast:
            return self._is_high(node)
        held = dtype(node)
        discrete = held is not None and not held.is_floating_point
        return discrete and any(self._high[item] for item in node.all_input_nodes)

    def _is_made_high(self, node: fx.Node) -> bool:
        """Whether a tensor out of nothing, or of integers alone, is FP32 whatever the model's format; a scalar promotes nothing."""
        fixed = "dtype" not in arguments(node) or (self._followers is not None and node.name not in self._followers)
        return fixed and dtype(node) in _HIGH and shape(node) != ()

    def _asks_for_high(self, node: fx.Node) -> bool:
        return arguments(node).get("dtype") in _HIGH and node.name not in (self._followers or ())

    def _raises(self, node: fx.Node) -> bool:
        if dtype(node) not in _HIGH:
            return False
        if self._followers is not None:
            return node.name not in self._followers
        # The model does not run in a low format, so the line of source says what was meant; where it holds casts of
        # both kinds, a value that is high is lowered.
        text = self._capture.nodes[node.name].code or ""
        both = _LOWERS.search(text) is not None
        return _RAISES.search(text) is not None and not (both and self._was_high(node))

    def _was_high(self, node: fx.Node) -> bool:
        return any(self._high[before] for before in node.all_input_nodes[:1])

    def _is_cast_up(self, node: fx.Node) -> bool:
        node = _unshaped(node)
        return row_of(node).cast and self._raises(node)


def _is_made_of_integers(node: fx.Node) -> bool:
    """Whether arithmetic on integers gives torch's default dtype, as `torch.arange(n) / n` does."""
    held = [dtype(item) for item in node.all_input_nodes]
    whole = bool(held) and all(item is not None and not (item.is_floating_point or item.is_complex) for item in held)
    return whole and dtype(node) in _HIGH


def _unshaped(node: fx.Node) -> fx.Node:
    while (row := row_of(node)).transparent and not row.cast and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def _promotes(node: fx.Node) -> bool:
    """Whether the operation takes the wider dtype of its operands; others refuse two dtypes, or take the first."""
    row = row_of(node)
    return row.promotes or row.transparent


def autocast_on(capture: Capture, name: str) -> bool:
    """Whether an ambient autocast reaches the node: no region around it switches it off."""
    node = capture.nodes.get(name)
    return node is None or node.region is None or node.region.enabled


def _followers(capture: Capture) -> frozenset[str] | None:
    """Nodes with a literal that changes with the model's format; None where no low run could be made."""
    if not capture.compared:
        return None
    return frozenset(name for name, node in capture.nodes.items() if node.literals or node.autocast_literals)


WORDS = {
    (True, True): "under autocast and in a cast model",
    (True, False): "under autocast (not in a cast model)",
    (False, True): "in a cast model (not under autocast)",
    (False, False): None,
}


class Lowered:
    """Dtypes that autocast leads to in the graph of an FP32 model, beside what the author raised in it."""

    def __init__(self, capture: Capture, upcasts: Upcasts) -> None:
        self._capture, self._upcasts = capture, upcasts
        self._low: dict[fx.Node, bool] = {}
        for node in capture.graph_module.graph.nodes:
            self._low[node] = node.op == "call_function" and _is_floating(node) and self._is_low(node)

    def where(self, node: fx.Node) -> str | None:
        """Under which use it computes on low values, in words; None where it does under neither."""
        if not _is_floating(node):
            return None
        cast = node.name not in self._upcasts.nodes and not self._upcasts.casts_up(node)
        return WORDS[self._low[node], cast]

    def _is_low(self, node: fx.Node) -> bool:
        row, record = row_of(node), self._capture.nodes.get(node.name)
        if record is not None and (row.cast or not node.all_input_nodes):
            return bool(record.autocast_literals)
        if record is not None and not record.in_place and autocast_on(self._capture, node.name):
            if row.autocast == "lower":
                return True
            if row.autocast in ("fp32", "fp32_unless_dtype"):
                return False
        given = [item for item in node.all_input_nodes if _is_floating(item)]
        tensors = [item for item in given if not _is_scalar(item)] or given
        if row.dtype_of_first or (record is not None and record.in_place):
            tensors = tensors[:1]
        return bool(tensors) and all(self._low[item] for item in tensors)


def _is_floating(node: fx.Node) -> bool:
    held = dtype(node)
    return held is not None and held.is_floating_point


def _is_scalar(node: fx.Node) -> bool:
    try:
        return shape(node) == ()
    except ValueError:
        return False
