"""How much memory the operations of a graph need one at a time, however little of the rest is in memory."""

from __future__ import annotations

from torch import fx

from ..numerics.nodes import tensors_of
from ..records import Capture

TIMES = 4
"""Times what an operation reads and gives that measuring it holds at once: FP32 and low values, gradients, and what
comparing them takes."""


def working_set(capture: Capture) -> int:
    """Bytes that the operation which reads and gives most takes to be measured."""
    called = (n for n in capture.graph_module.graph.nodes if n.op == "call_function")
    return TIMES * max((sum(map(_size, {n, *n.all_input_nodes})) for n in called), default=0)


def _size(n: fx.Node) -> int:
    """Bytes of a value in FP32, or in what is wider."""
    return sum(x.numel() * max(x.element_size(), 4) for x in tensors_of(n.meta.get("val")) if not x.is_nested)
