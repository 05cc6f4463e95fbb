"""Views of tensors: how to compute a view from its source, and the source after a write to the view."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import fx

from ..numerics.nodes import operation_of

Emit = Callable[..., fx.Node]
"""emit(target, args, kwargs, val) -> node: adds an operation to the graph. val: a tensor of the result's shape."""

Constant = Callable[[torch.Tensor], fx.Node]

_aten = torch.ops.aten


class Geometry(NamedTuple):
    """A tensor's layout in its storage. stride: None if the strides are unknown."""

    shape: tuple[int, ...]
    stride: tuple[int, ...] | None
    offset: int
    dtype: torch.dtype

    def outline(self) -> torch.Tensor:
        """A meta tensor with this layout."""
        if self.stride is None:
            return torch.empty(self.shape, dtype=self.dtype, device="meta")
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")

    def places(self) -> torch.Tensor:
        """Positions of the tensor's entries in the storage, in the tensor's order."""
        assert self.stride is not None
        places = torch.full(self.shape, self.offset)
        for dim, (size, step) in enumerate(zip(self.shape, self.stride, strict=True)):
            along_dim = [1] * len(self.shape)
            along_dim[dim] = size
            places += (torch.arange(size) * step).reshape(along_dim)
        return places.reshape(-1)


@dataclass(frozen=True)
class View:
    """How a view was made: op(source, *args, **kwargs), or result number `index` of this call, if set."""

    op: Any
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    index: int | None = None

    def reshapes(self, geometry: Geometry, source: Geometry) -> bool:
        """Whether the view has all entries of its source in the same order, possibly in another shape."""
        same = geometry.dtype == source.dtype and _count(geometry.shape) == _count(source.shape)
        return same and operation_of(self.op).entries == "same"


ALIAS = View(_aten.alias.default)


class Selection:
    """A view made by an unknown operation: entries at some positions of the source, in the source's order."""

    def __init__(self, places: torch.Tensor, shape: tuple[int, ...]) -> None:
        self.places, self.shape = places, shape
        self.__name__ = "taken"


def find_view(own: Geometry, source: Geometry) -> View | None:
    """The View that derives a tensor of layout `own` from a tensor of layout `source`; None if no View does."""
    if own.dtype != source.dtype or own.stride is None or source.stride is None:
        return None
    if own == source:
        return ALIAS
    order = _order(own, source)
    if order is not None:
        return View(_aten.permute.default, (order,))
    along = _slice_of(own, source)
    if along is not None:
        return View(_aten.slice.Tensor, along)
    there = _indices_of(source.places(), own.places())
    return View(Selection(there, own.shape)) if there is not None else None


def read(emit: Emit, constant: Constant, view: View, own: Geometry, parent: Geometry, whole: fx.Node) -> fx.Node:
    """Add the operations that compute a view from its parent's node `whole`; returns the view's node."""
    value = own.outline()
    if view.op is _aten.alias.default:
        return whole
    if isinstance(view.op, Selection):
        return _take(emit, constant, whole, view.op, value)
    if view.index is None:
        return emit(view.op, (whole, *view.args), view.kwargs, value)
    if operation_of(view.op).packet == "unbind":  # `select` computes one of the results of `unbind`
        return emit(_aten.select.int, (whole, _dim_of(view), view.index), {}, value)
    along = _slice_of(own, parent)
    if along is not None:
        return emit(_aten.slice.Tensor, (whole, *along), {}, value)
    node = emit(view.op, (whole, *view.args), view.kwargs, value)
    return emit(operator.getitem, (node, view.index), {}, value)


def scatter(
    emit: Emit, constant: Constant, view: View, own: Geometry, parent: Geometry, whole: fx.Node, part: fx.Node
) -> fx.Node:
    """The node with the parent's entries after one of the parent's views was set to `part`."""
    if view.op is _aten.alias.default:
        return part
    value = parent.outline()
    row = operation_of(view.op)
    if row.scatter:
        inverse = getattr(_aten, row.scatter).default
        return emit(inverse, (whole, part, *view.args), view.kwargs, value)
    if row.packet == "unbind":
        return emit(_aten.select_scatter.default, (whole, part, _dim_of(view), view.index), {}, value)
    restored = _restore(emit, view, own, parent, part)
    if restored is not None:
        return restored
    if row.complement:
        other = emit(getattr(_aten, row.complement).default, (whole,), {}, own.outline())
        real_and_imaginary = (part, other) if row.packet == "real" else (other, part)
        return emit(_aten.complex.default, real_and_imaginary, {}, value)
    if own.dtype != parent.dtype:
        return emit(_aten.view.dtype, (part, parent.dtype), {}, value)
    along = _slice_of(own, parent)
    if along is not None:
        return emit(_aten.slice_scatter.default, (whole, part, *along), {}, value)
    return put(emit, constant, whole, _places_of(view, parent), part, value)


def _restore(emit: Emit, view: View, own: Geometry, parent: Geometry, part: fx.Node) -> fx.Node | None:
    """The parent's node from a view with all its entries; None for other views."""
    value = parent.outline()
    inverse = _inverse(view, parent)
    if inverse is not None:
        op, args = inverse
        return emit(op, (part, *args), {}, value)
    if view.reshapes(own, parent) or own == parent:
        return emit(_aten.reshape.default, (part, list(parent.shape)), {}, value)
    return None


def _places_of(view: View, parent: Geometry) -> torch.Tensor:
    """Positions of a view's entries in its parent, whose entries are numbered in order."""
    if isinstance(view.op, Selection):
        return view.op.places
    numbers = torch.arange(_count(parent.shape)).reshape(parent.shape)
    places = view.op(numbers, *view.args, **view.kwargs)
    if view.index is not None:
        places = places[view.index]
    flat: torch.Tensor = places.reshape(-1)
    return flat


def put(
    emit: Emit, constant: Constant, whole: fx.Node, places: torch.Tensor, part: fx.Node, value: torch.Tensor
) -> fx.Node:
    """A node with the entries of `whole`, except that the entries at `places` are the entries of `part`."""
    flat_value = value.new_empty(value.numel())
    new_value = value.new_empty(places.numel())
    flat = emit(_aten.reshape.default, (whole, [-1]), {}, flat_value)
    new = emit(_aten.reshape.default, (part, [-1]), {}, new_value)
    indices = [constant(places)]
    changed = emit(_aten.index_put.default, (flat, indices, new), {}, flat_value)
    return emit(_aten.reshape.default, (changed, list(value.shape)), {}, value)


def overwrite(
    emit: Emit, constant: Constant, other: tuple[fx.Node, Geometry], written: tuple[fx.Node, Geometry]
) -> fx.Node | None:
    """Add the operations that update a tensor after a write to another tensor with which it shares its storage.

    other: (node, layout) of the tensor to update. written: the same of the tensor that was written. Returns the updated
    node; None if the two share no entry, or if this is unknown (another dtype, or no strides).
    """
    whole, own = other
    node, source = written
    if own.dtype != source.dtype or own.stride is None or source.stride is None:
        return None
    written_places = source.places()
    own_places = own.places()
    shared = torch.isin(own_places, written_places).nonzero().reshape(-1)
    count = len(shared)
    if not count:
        return None
    indices = _indices_of(written_places, own_places[shared])
    assert indices is not None
    selection = Selection(indices, (count,))
    part = _take(emit, constant, node, selection, source.outline().new_empty(count))
    return put(emit, constant, whole, shared, part, own.outline())


def _take(emit: Emit, constant: Constant, source: fx.Node, view: Selection, value: torch.Tensor) -> fx.Node:
    """Add the operations that select a view's entries from a source. value: a tensor with the view's shape and dtype."""
    whole = source.meta.get("val")
    count = whole.numel() if isinstance(whole, torch.Tensor) else 0
    flat = emit(_aten.reshape.default, (source, [-1]), {}, value.new_empty(count))
    places = constant(view.places)
    selected = value.new_empty(len(view.places))
    entries = emit(_aten.index_select.default, (flat, 0, places), {}, selected)
    return emit(_aten.reshape.default, (entries, list(view.shape)), {}, value)


def _dim_of(view: View) -> int:
    dim: int = view.args[0] if view.args else view.kwargs.get("dim", 0)
    return dim


def _inverse(view: View, parent: Geometry) -> tuple[Any, tuple[Any, ...]] | None:
    """The operation that undoes a view of its whole source, and its arguments after the tensor; None if unknown."""
    row = operation_of(view.op)
    if row.inverse:
        return getattr(_aten, row.inverse).default, ()
    if row.packet == "transpose" and not view.kwargs:
        return _aten.transpose.int, view.args
    if row.packet == "permute" and view.args:
        order = [dim % len(parent.shape) for dim in view.args[0]]
        return _aten.permute.default, ([order.index(i) for i in range(len(order))],)
    return None


def _order(own: Geometry, source: Geometry) -> list[int] | None:
    """The permutation of the source's dimensions that gives the view; None if no permutation does."""
    assert own.stride is not None and source.stride is not None
    if own.offset != source.offset or len(own.shape) != len(source.shape):
        return None
    left = list(zip(source.shape, source.stride, strict=True))
    order = []
    for dim in zip(own.shape, own.stride, strict=True):
        if dim not in left:
            return None
        order.append(left.index(dim))
        left[order[-1]] = (-1, -1)
    return order


def _slice_of(own: Geometry, parent: Geometry) -> tuple[int, int, int] | None:
    """(dim, start, end) of a view that differs from its parent only in the length of one dimension."""
    if own.stride is None or parent.stride is None or own.stride != parent.stride:
        return None
    sizes = zip(own.shape, parent.shape, strict=True)
    shorter = [dim for dim, (own_size, parent_size) in enumerate(sizes) if own_size != parent_size]
    if len(shorter) != 1:
        return None
    dim = shorter[0]
    step = own.stride[dim]
    if not step:
        return None
    start, rest = divmod(own.offset - parent.offset, step)
    end = start + own.shape[dim]
    is_slice = not rest and start >= 0 and end <= parent.shape[dim]
    return (dim, start, end) if is_slice else None


def _indices_of(among: torch.Tensor, places: torch.Tensor) -> torch.Tensor | None:
    """Indices of the positions `places` in `among`; None if a position is missing."""
    order = among.argsort()
    at = torch.searchsorted(among[order], places).clamp(max=max(0, len(among) - 1))
    if not len(among):
        return places if not len(places) else None
    result = order[at]
    return result if torch.equal(among[result], places) else None


def _count(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


def address(x: torch.Tensor) -> int | None:
    """A key for a tensor's storage, unique among live storages; None if the tensor has no storage."""
    if x.layout is not torch.strided or x.is_quantized or x.is_nested:
        return None
    try:
        return int(x.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):  # wrapper tensors have no storage
        return None


def geometry_of(x: torch.Tensor) -> Geometry:
    """A tensor's current layout in its storage."""
    if address(x) is None:
        shape = () if x.is_nested else tuple(x.shape)
        return Geometry(shape, None, 0, x.dtype)
    return Geometry(tuple(x.shape), tuple(x.stride()), int(x.storage_offset()), x.dtype)


def shares_memory(x: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors use the same storage."""
    place = address(x)
    return place is not None and place == address(other)
