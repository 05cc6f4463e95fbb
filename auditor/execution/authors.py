"""What the author runs low whatever the plan: in an autocast region of his own, or by a cast that he wrote."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ..numerics.formats import is_low as format_is_low
from ..records import Capture, Node
from .resolve import Resolution, is_low, resolve
from .strategies import plain, running


def kept_low(capture: Capture, strategies: Iterable[str], format: str) -> dict[str, str]:
    """{node: the low format that it runs in, with everything in FP32 and with everything in `format`, under each strategy}.

    Of a node with a wide result that is the format of what it reads: an upcast cannot bring back lost bits.
    """
    if not any(_may_be_low(node) for node in capture.nodes.values()):
        return {}
    runs = [
        resolve(capture, running(capture, strategy, plain(precision), format))
        for strategy in strategies
        for precision in ("fp32", format)
    ]
    found = {}
    for name, node in capture.nodes.items():
        formats = {_low_format(node, resolution) for resolution in runs}
        own = formats.pop()
        if own is not None and not formats:
            found[name] = own
    return found


def _low_format(node: Node, resolution: Resolution) -> str | None:
    """The one low format that a node computes in or reads; None where there is none, or several."""
    if resolution.low(node.name):
        return resolution.dtypes[node.name]
    read = {resolution.dtypes[source] for source in node.inputs if is_low(resolution.dtypes[source])}
    return read.pop() if len(read) == 1 and node.name in resolution.reads_low else None


def _may_be_low(node: Node) -> bool:
    """Whether the author put a node in a region of autocast, or it was low when it was recorded."""
    inside = node.region is not None and node.region.enabled
    return inside or (bool(node.dtype) and format_is_low(getattr(torch, node.dtype)))
