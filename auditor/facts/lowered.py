"""Where an operation computes low: under autocast, in a model cast as a whole, or in both."""

from __future__ import annotations

from torch import fx

from ..ops.nodes import dtype, row_of, shape
from ..records import Capture
from .upcasts import Upcasts, autocast_on

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
