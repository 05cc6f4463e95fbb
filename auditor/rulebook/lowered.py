"""Where an operation computes low, under autocast or in a model cast as a whole, and which ones the author keeps in FP32.

In the graph of an FP32 model a cast up and a cast back look the same, both go from float32 to float32. What tells them
apart are the dtypes that a low run of it has: there a cast back goes to the format, a cast up does not.
"""

from __future__ import annotations

from torch import fx

from ..execution.policy import Policy, plain
from ..execution.resolve import Resolution, is_low, resolve
from ..numerics.nodes import dtype, row_of, shape
from ..records import Capture
from .values import is_floating

WORDS = {
    (True, True): "under autocast and in a cast model",
    (True, False): "under autocast (not in a cast model)",
    (False, True): "in a cast model (not under autocast)",
    (False, False): None,
}


class Uses:
    """The dtypes of a capture in both plain uses. upcasts: operations, casts aside, that compute high by the author's word.

    What autocast lowers, such as a product, reads raised values but hands none on, unless autocast is off around it.
    """

    def __init__(self, capture: Capture) -> None:
        formats = (fmt for node in capture.nodes.values() for fmt in (*node.literals, *node.autocast_literals))
        fmt = next(formats, "bf16")
        self._under, self._cast = (_plainly(capture, strategy, fmt) for strategy in ("autocast", "cast"))
        self.upcasts = frozenset(
            node.name
            for node in capture.graph_module.graph.nodes
            if node.name in capture.nodes and self._is_upcast(node)
        )

    def where(self, node: fx.Node) -> str | None:
        """Under which use it computes on low values, in words; None where it does under neither."""
        floating = is_floating(node)
        return WORDS[floating and self._under.low(node.name), floating and self._cast.low(node.name)]

    def casts_up(self, node: fx.Node) -> bool:
        """Whether the node itself makes FP32 out of what it reads, or out of nothing."""
        makes = row_of(node).cast or _is_made(node)
        return makes and self._is_high(node)

    def casts_up_input(self, node: fx.Node) -> bool:
        """Whether one of the node's inputs is a cast up, reshapes aside."""
        return node.name in self.upcasts and any(
            row_of(origin).cast and self._is_high(origin) for origin in map(_unshaped, node.all_input_nodes)
        )

    def _is_high(self, node: fx.Node) -> bool:
        """Whether the value stays high in both uses; a scalar that is made promotes nothing."""
        if node.op != "call_function" or not is_floating(node) or (_is_made(node) and shape(node) == ()):
            return False
        return not self._cast.low(node.name) and not self._under.low(node.name)

    def _is_upcast(self, node: fx.Node) -> bool:
        reads = any(self._hands_on(item, node) for item in node.all_input_nodes)
        if not is_floating(node) or row_of(node).cast:
            return reads and not is_floating(node)
        if is_low(self._cast.computed(node.name)):
            return False
        return reads or (self._is_high(node) and (_is_made(node) or not self._under.low(node.name)))

    def _hands_on(self, node: fx.Node, reader: fx.Node) -> bool:
        """Whether the reader computes high because of this input; beside low ones, what is made takes part in promotion only."""
        row = row_of(reader)
        beside_low = any(self._cast.low(item.name) for item in reader.all_input_nodes)
        made = _is_made(_unshaped(node)) and beside_low and not (row.promotes or row.transparent)
        return self._is_high(node) and not made


def _plainly(capture: Capture, strategy: str, fmt: str) -> Resolution:
    return resolve(Policy(capture, strategy, plain(fmt), fmt))


def _is_made(node: fx.Node) -> bool:
    """Whether it is made out of nothing, or of integers alone."""
    read = [dtype(item) for item in node.all_input_nodes]
    return node.op == "call_function" and not any(held and (held.is_floating_point or held.is_complex) for held in read)


def _unshaped(node: fx.Node) -> fx.Node:
    while (row := row_of(node)).transparent and not row.cast and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node
