"""Choices made on values that are a little off: what may become of an index, a mask or a count where the error is another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from ..numerics.entries import extent, is_number, is_plain
from ..numerics.nodes import row_of, tensors_of
from .execute import RECORDED

DRAWS = 8
"""Errors tried at each choice."""

REACH = 4.0
"""How many times as large as the error that is there, entry by entry, those that are tried may be."""


def is_choice(n: fx.Node, reference: Any) -> bool:
    """Whether rounding its inputs changes its result by leaps: an index, a mask, a rounding to whole numbers."""
    row = row_of(n)
    if n.op != "call_function" or row.asks_shape or row.asks_finite:
        return False
    return row.steps or any(not is_number(x) for x in tensors_of(reference))


def differing(result: Any, reference: Any, n: fx.Node) -> int:
    """How many choices are others; of rounding to whole numbers, how many numbers."""
    pairs, steps = zip(tensors_of(result), tensors_of(reference), strict=False), row_of(n).steps
    return sum(
        int((x != y).sum()) if extent(x) == extent(y) else max(y.numel(), 1)
        for x, y in pairs
        if steps or not is_number(y)
    )


def provoked(
    n: fx.Node, actual: Any, reference: Any, before: Callable[[fx.Node], Any], now: Callable[[fx.Node], Any]
) -> Any:
    """The actual result with those choices that differ most from the reference among some errors of its inputs.

    Errors of many operations may cancel just where a choice is made, and one of them alone decide it: so errors of the
    same size are drawn at random. before, now: values of its inputs, without the errors and with them.
    """
    sources = {source: _spread(before(source), now(source)) for source in n.all_input_nodes}
    if not any(spread is not None for spread in sources.values()):
        return actual
    generator = torch.Generator().manual_seed(0)
    found, most = actual, differing(actual, reference, n)
    for _ in range(DRAWS):

        def disturbed(source: fx.Node) -> Any:
            spread = sources[source]
            if spread is None:
                return now(source)
            return before(source) + torch.randn(spread.shape, generator=generator).to(spread) * spread

        result = RECORDED.compute(n, disturbed)
        if (many := differing(result, reference, n)) > most:
            found, most = result, many
    return found if row_of(n).steps else _chosen(actual, found)


def _spread(before: Any, now: Any) -> torch.Tensor | None:
    """How far errors are tried, per entry; None where there are none, or no numbers to compare."""
    if not (isinstance(before, torch.Tensor) and isinstance(now, torch.Tensor)):
        return None
    if not before.is_floating_point() or not is_plain(before) or before.shape != now.shape:
        return None
    off = (now - before).abs()
    if not off.numel() or not bool(torch.isfinite(off).all()) or not bool(off.any()):
        return None
    return REACH * (off + off.square().mean().sqrt())


def _chosen(actual: Any, found: Any) -> Any:
    """The actual numbers beside the choices found."""
    ours, spec = pytree.tree_flatten(actual)
    theirs = pytree.tree_leaves(found)
    pairs = zip(ours, theirs, strict=True)
    return pytree.tree_unflatten([a if isinstance(a, torch.Tensor) and is_number(a) else b for a, b in pairs], spec)
