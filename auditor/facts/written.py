"""Values that are as large as their author wrote them: a mask's -1e9 is no activation."""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import fx

from ..ops.nodes import row_of
from ..records import Capture, Magnitudes
from .values import constants

LEAST = 1e3
"""Magnitude from which on a literal hides scores instead of scaling or shifting them."""
EXACT = 1e-6
"""What FP32 leaves of a literal."""
NEAR = 0.1
"""What scores may take away from a mask that is added to them."""


def written(capture: Capture, ranges: Mapping[str, Magnitudes]) -> frozenset[str]:
    """Names of the operations whose largest magnitude is a literal, or a constant's that holds one number beside zeros.

    What only passes such a value on, or scales it, is among them; a bound that values are clamped to is no such literal.
    """
    found: set[str] = set()
    made = {place.name for place in capture.placeholders if place.kind == "constant"}
    for node in capture.graph_module.graph.nodes:
        span = ranges.get(node.name)
        if span is None or span.max_abs < LEAST:
            continue
        if node.op == "placeholder":
            alone = math.isclose(span.max_abs, span.min_abs, rel_tol=EXACT)
            own = alone and (span.zeros > 0 or node.name in made)
        else:
            own = _is_written(node, span.max_abs)
        if own or any(
            _passes(node, source, span.max_abs, ranges) for source in node.all_input_nodes if source.name in found
        ):
            found.add(node.name)
    return frozenset(found & capture.nodes.keys())


def _is_written(node: fx.Node, largest: float) -> bool:
    row = row_of(node)
    bounds = row.kink and not row.promotes
    return not bounds and any(
        math.isclose(largest, abs(literal), rel_tol=EXACT) for literal in constants(node, frozenset())
    )


def _passes(node: fx.Node, source: fx.Node, largest: float, ranges: Mapping[str, Magnitudes]) -> bool:
    return row_of(node).scales or math.isclose(largest, ranges[source.name].max_abs, rel_tol=NEAR)
