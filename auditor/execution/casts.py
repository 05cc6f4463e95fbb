"""Finds casts to fewer bits that nobody asked for: on loading, and in the forward."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import fx

from ..capture.paths import reach
from ..numerics.formats import dtype_name, significant_bits
from ..numerics.metrics import loss_of
from ..numerics.nodes import dtype, row_of
from ..records import Capture, Subject
from ..records.ledger import SilentCast
from .execute import RECORDED, Executor
from .policy import Policy


class _Cast(NamedTuple):
    """A cast in the forward. source: the node whose value is cast; None: the result written in place. scale: the node
    of the divisor or factor before a cast to 8 bits."""

    kind: str
    source: fx.Node | None
    to: torch.dtype
    scale: fx.Node | None = None


def silent_casts(capture: Capture, subject: Subject) -> tuple[SilentCast, ...]:
    """Casts to fewer bits that nobody asked for: on loading, and in the forward if they change values of the first
    batch, measured in one replay.

    In the forward: explicit casts, and casts by autocast regions of the model that undo an upcast. Not included: casts
    to the only dtype of the parameters. Casts on one source line are merged into the first.
    """
    capture = capture.first
    loaded = {row.loaded for row in subject.stored if row.kind == "parameter"}
    casts = dict[fx.Node, _Cast]()
    for n in capture.graph_module.graph.nodes:
        cast = _cast_of(capture, n) if n.name in capture.nodes else None
        if cast is not None and loaded != {dtype_name(cast.to)}:
            casts[n] = cast
    executor = Executor(capture.graph_module, Policy.wide(capture))
    found = dict[Any, SilentCast]()
    with torch.no_grad():
        for n, _ in executor.steps(*capture.bind(subject.model, subject.batches[0])) if casts else ():
            cast = casts.get(n)
            if cast is None:
                continue
            if cast.scale is not None and not bool((executor.value_of(cast.scale) == 1).all()):
                continue  # scaled to the range of 8 bits, so on purpose
            x = executor.value_of(cast.source) if cast.source else RECORDED.compute(n, executor.value_of)
            loss = loss_of(x, x.to(cast.to))
            if loss is None:
                continue
            node = capture.nodes[n.name]
            key = cast.kind, node.source_path, node.source, node.op
            first = SilentCast(cast.kind, (), dtype_name(x.dtype), dtype_name(cast.to), loss, node=n.name)
            known = found.setdefault(key, first)
            names = dict.fromkeys((*known.names, node.owner or "the model"))
            found[key] = replace(known, names=tuple(names))
    return (*subject.casts, *found.values())


def _cast_of(capture: Capture, n: fx.Node) -> _Cast | None:
    """The cast that an operation makes, unless the cast returns to a dtype in which the value was computed before."""
    node, own = capture.nodes[n.name], dtype(n)
    if row_of(n).cast and n.all_input_nodes and own is not None:
        source = n.all_input_nodes[0]
        returns = any(dtype(m) is own and not row_of(m).cast for m in _upstream(source))
        scale = _scale_of(source) if own.itemsize == 1 else None
        if _is_narrowing(source, own) and not returns and (scale is None or scale.op == "placeholder"):
            return _Cast("scale" if scale else "forward", source, own, scale)
    elif node.in_place and own is not None and any(_is_narrowing(x, own) for x in n.all_input_nodes):
        return _Cast("forward", None, own)
    elif node.region is not None and node.region.enabled and row_of(n).autocast == "lower":
        to = getattr(torch, node.region.dtype)
        narrowed = (x for x in n.all_input_nodes if _is_narrowing(x, to))
        upcast = (x for x in narrowed if any(row_of(m).cast and dtype(m) is torch.float32 for m in _upstream(x)))
        return next((_Cast("autocast", x, to) for x in upcast), None)
    return None


def _is_narrowing(source: fx.Node, to: torch.dtype) -> bool:
    """Whether a dtype has fewer significant bits than the value's dtype and than FP32, the dtype of the reference."""
    before = significant_bits(dtype(source) or torch.bool)
    return 0 < significant_bits(to) < min(before, significant_bits(torch.float32))


def _upstream(n: fx.Node) -> list[fx.Node]:
    """A node and the operations upstream of it. The search does not go beyond results that are not FP32."""
    values = reach([n], lambda m: m.all_input_nodes if dtype(m) is torch.float32 else ())
    return [m for m in values if m.op == "call_function"]


def _scale_of(n: fx.Node) -> fx.Node | None:
    """The second operand of the division or product that scales a value before a cast to 8 bits."""
    while ((row := row_of(n)).packet in ("clamp", "clip") or row.transparent) and n.all_input_nodes:
        n = n.all_input_nodes[0]
    scaled = row.packet in ("div", "mul") and len(n.all_input_nodes) == 2
    return n.all_input_nodes[1] if scaled else None
