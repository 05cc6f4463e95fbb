"""Literals: which of them a format cannot hold, loses, or takes for one, and which values are as large as one."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import lru_cache

import torch
from torch import fx

from ..numerics.carried import round_to
from ..numerics.formats import FORMATS, narrower
from ..numerics.nodes import row_of
from ..records import Capture, Magnitudes
from .values import constants


def formats_where(holds: Callable[[float, str], bool], literals: tuple[float, ...]) -> tuple[str, ...]:
    """Names of the formats in which `holds(literal, format)` is true of some literal."""
    return tuple(name for name in narrower() if any(holds(literal, name) for literal in literals))


def beyond(literal: float, name: str) -> bool:
    """Whether rounding to the format leaves its range: to infinity, or, where it has none, down to its largest number."""
    return abs(_rounded(literal, name)) == float("inf") or (
        FORMATS[name].overflows_to == "largest" and abs(literal) > FORMATS[name].largest
    )


def lost(literal: float, name: str) -> bool:
    """Whether a literal other than zero is zero in the format."""
    return literal != 0 and _rounded(literal, name) == 0


def as_one(literal: float, name: str) -> bool:
    """Whether a literal other than one is one in the format."""
    return literal != 1 and _rounded(literal, name) == 1


@lru_cache(maxsize=4096)
def _rounded(literal: float, name: str) -> float:
    return float(round_to(torch.tensor(literal, dtype=torch.float32), name))


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
