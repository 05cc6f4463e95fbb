"""Facts about indexed additions such as `index_add`, with which models count or sum up: what is added, its size, how
often."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import fx

from ..numerics.nodes import adds_by_index, arguments_with_defaults, dtype, row_of, shape, source
from ..records import Magnitudes
from .values import nearest_range

_TERMS = {
    "index_add": "source",
    "scatter_add": "src",
    "scatter_reduce": "src",
    "scatter": "src",
    "put": "source",
}
"""{operation: the argument that holds the terms}; not index_put, which sums the terms of an entry in FP32."""

_ONES = ("ones", "new_ones", "ones_like")
NEAR = 1e-2
"""Relative difference between the largest and the smallest term, up to which an addition counts."""


def facts_of_counts(node: fx.Node, ranges: Mapping[str, Magnitudes]) -> dict[str, Any]:
    """Facts about one indexed addition; {} for other operations."""
    terms = _terms(node)
    if terms is None:
        return {}
    span = _span(terms, ranges)
    total, largest = nearest_range(node, ranges), span[1] if span else None
    return {
        "added_terms": _number(node),
        "largest_term": largest,
        "total_in_terms": total.max_abs / largest if total and largest else None,
        "counts": _are_whole(terms) or (span is not None and math.isclose(*span, rel_tol=NEAR)),
    }


def _terms(node: fx.Node) -> fx.Node | float | None:
    """What an indexed addition adds; None for other operations."""
    name = _TERMS.get(row_of(node).packet)
    if name is None or not adds_by_index(node):
        return None
    given = arguments_with_defaults(node)
    terms = given.get(name, given.get("value"))
    return terms if isinstance(terms, (fx.Node, int, float)) else None


def _number(node: fx.Node) -> int | None:
    """Largest number of terms that one entry can get: the size of the index along the operation's axis."""
    given = arguments_with_defaults(node)
    try:
        size = shape(given["index"])
    except ValueError:
        return None
    axis = given.get("dim", 0) if len(size) > 1 else 0
    return size[axis] if size and "dim" in given else math.prod(size)


def _span(terms: fx.Node | float, ranges: Mapping[str, Magnitudes]) -> tuple[float, float] | None:
    """The smallest non-zero and the largest magnitude of the terms; None if all are zero, or unknown."""
    if not isinstance(terms, fx.Node):
        return (abs(float(terms)), abs(float(terms))) if terms else None
    magnitudes = nearest_range(terms, ranges)
    if magnitudes is not None:
        return (magnitudes.min_abs, magnitudes.max_abs) if magnitudes.max_abs else None
    return (1.0, 1.0) if row_of(source(terms)).packet in _ONES else None


def _are_whole(terms: fx.Node | float) -> bool:
    """Whether the terms are whole numbers by construction: ones, a literal, a mask, or other integers."""
    if not isinstance(terms, fx.Node):
        return float(terms).is_integer()
    origin = source(terms)
    dtype_of_origin = dtype(origin)
    whole = dtype_of_origin is not None and not dtype_of_origin.is_floating_point and not dtype_of_origin.is_complex
    return whole or row_of(origin).packet in _ONES
