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
    casts = _casts_in_forward(capture, subject)
    if not casts:
        return subject.casts
    executor = Executor(capture.graph_module, Policy.wide(capture))
    by_line = dict[Any, SilentCast]()
    with torch.no_grad():
        for n, _ in executor.steps(*capture.bind(subject.model, subject.batches[0])):
            if n not in casts:
                continue
            cast = casts[n]
            if cast.scale is not None and not bool((executor.value_of(cast.scale) == 1).all()):
                continue  # scaled to the range of 8 bits, so on purpose
            value_of = executor.value_of
            x = value_of(cast.source) if cast.source else RECORDED.compute(n, value_of)
            loss = loss_of(x, x.to(cast.to))
            if loss is None:
                continue
            node = capture.nodes[n.name]
            line = (cast.kind, node.source_path, node.source, node.op)
            own = SilentCast(cast.kind, (), dtype_name(x.dtype), dtype_name(cast.to), loss, node=n.name)
            first = by_line.setdefault(line, own)
            names = dict.fromkeys((*first.names, node.owner or "the model"))
            by_line[line] = replace(first, names=tuple(names))
    return (*subject.casts, *by_line.values())


def _casts_in_forward(capture: Capture, subject: Subject) -> dict[fx.Node, _Cast]:
    """The casts of a forward, except those to the only dtype of the parameters."""
    loaded = {row.loaded for row in subject.stored if row.kind == "parameter"}
    casts = dict[fx.Node, _Cast]()
    for n in capture.graph_module.graph.nodes:
        if n.name not in capture.nodes:
            continue
        cast = _cast_of(capture, n)
        if cast is not None and loaded != {dtype_name(cast.to)}:
            casts[n] = cast
    return casts


def _cast_of(capture: Capture, n: fx.Node) -> _Cast | None:
    """The cast that an operation makes, unless the cast returns to a dtype in which the value was computed before."""
    node = capture.nodes[n.name]
    own = dtype(n)
    if row_of(n).cast and n.all_input_nodes and own is not None:
        return _explicit_cast(n, own)
    if node.in_place and own is not None and any(_is_narrowing(source, own) for source in n.all_input_nodes):
        return _Cast("forward", None, own)
    if node.region is not None and node.region.enabled and row_of(n).autocast == "lower":
        return _autocast_of_upcast(n, getattr(torch, node.region.dtype))
    return None


def _explicit_cast(n: fx.Node, to: torch.dtype) -> _Cast | None:
    """A narrowing cast that the model's code asks for. To 8 bits, only with a scale that is a weight, or without one: a
    computed scale shows that the cast is on purpose."""
    source = n.all_input_nodes[0]
    if not _is_narrowing(source, to):
        return None
    returns = any(dtype(upstream) is to and not row_of(upstream).cast for upstream in _upstream(source))
    if returns:
        return None
    scale = _scale_of(source) if to.itemsize == 1 else None
    if scale is None:
        return _Cast("forward", source, to)
    if scale.op != "placeholder":
        return None
    return _Cast("scale", source, to, scale)


def _autocast_of_upcast(n: fx.Node, to: torch.dtype) -> _Cast | None:
    """The cast by which an autocast region undoes an upcast to FP32."""
    for source in n.all_input_nodes:
        if not _is_narrowing(source, to):
            continue
        if any(row_of(upstream).cast and dtype(upstream) is torch.float32 for upstream in _upstream(source)):
            return _Cast("autocast", source, to)
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
