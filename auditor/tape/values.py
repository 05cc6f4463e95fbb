"""Which node of the tape holds which tensor, while tensors are viewed, written to and let go."""

from __future__ import annotations

import itertools
import operator
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

Emit = Callable[..., fx.Node]
"""emit(target, args, kwargs, val) -> node: puts an operation on the tape. val: a tensor of the result's shape."""

_aten = torch.ops.aten
_RESHAPES = frozenset(
    "view reshape _unsafe_view flatten unflatten squeeze unsqueeze alias detach view_as reshape_as contiguous ravel "
    "squeeze_ unsqueeze_ lift_fresh".split()
)
_SCATTERS = {"select": "select_scatter", "slice": "slice_scatter", "diagonal": "diagonal_scatter"}


@dataclass(eq=False)
class Memory:
    """One storage. roots: the tensors on it that are views of no other one that is known; alive: ids of all known."""

    roots: list[Entry] = field(default_factory=list)
    alive: dict[int, Any] = field(default_factory=dict)


@dataclass(eq=False)
class Entry:
    """One tensor: the node that holds it since `version` of its root, and how it was made if it is a view.

    shape, stride, offset, dtype: as it lies in its memory. index: which result of the view operation it is.
    """

    node: fx.Node
    geometry: tuple[Any, ...]
    memory: Memory | None
    source: Entry | None = None
    op: Any = None
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    index: int | None = None
    version: int = 0

    @property
    def root(self) -> Entry:
        """The tensor that this one is, in the end, a view of."""
        entry = self
        while entry.source is not None:
            entry = entry.source
        return entry


class Values:
    """The tensors of a run. constant(tensor) -> node makes a place for one that comes from nowhere."""

    def __init__(self, emit: Emit, constant: Callable[[torch.Tensor], fx.Node]) -> None:
        self._emit, self._constant = emit, constant
        self._known: dict[int, tuple[Any, Entry]] = {}
        self._memories: dict[int, Memory] = {}

    def node_of(self, x: torch.Tensor) -> fx.Node:
        """The node with this tensor's entries as they are now; an unknown tensor becomes a constant, copied now."""
        entry = self._entry_of(x)
        return self._unknown(x) if entry is None else self._current(entry)

    def knows(self, x: torch.Tensor) -> bool:
        """Whether this very tensor has a node."""
        return self._entry_of(x) is not None

    def bind(self, x: torch.Tensor, node: fx.Node) -> None:
        """`x` is new, and its entries are the node's."""
        memory = self._memory_of(x)
        if memory is not None and memory.alive:  # its address was another tensor's before
            memory = self._memories[_address(x) or 0] = Memory()
        self._add(x, Entry(node, _geometry(x), memory))

    def bind_view(
        self,
        x: torch.Tensor,
        node: fx.Node,
        source: torch.Tensor,
        op: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        index: int | None = None,
    ) -> None:
        """`x` lies in the memory of `source`, as `op` with further arguments made it."""
        parent = self._entry_of(source)
        assert parent is not None
        entry = Entry(node, _geometry(x), parent.memory, parent, op, args, kwargs, index, parent.root.version)
        self._add(x, entry)

    def rebind(self, x: torch.Tensor, node: fx.Node) -> None:
        """`x` has another place, and maybe another shape, from now on."""
        self._forget(x)
        self._memories.pop(_address(x) or 0, None)
        self.bind(x, node)

    def same(self, x: torch.Tensor, other: torch.Tensor) -> None:
        """`x` is `other` under another name."""
        parent = self._entry_of(other)
        if parent is None:
            self.node_of(other)
            parent = self._entry_of(other)
        assert parent is not None
        node = self._current(parent)
        if parent.memory is None or _address(x) != _address(other):
            self._add(x, Entry(node, _geometry(x), self._memory_of(x)))
        else:
            self.bind_view(x, node, other, _aten.alias.default, (), {})

    def write(self, x: torch.Tensor, node: fx.Node) -> None:
        """The entries of `x` are the node's from now on, and so are those of whatever shares memory with it."""
        entry = self._entry_of(x)
        assert entry is not None
        chain = [entry]
        while chain[-1].source is not None:
            chain.append(chain[-1].source)
        nodes = [node]
        for child, parent in itertools.pairwise(chain):
            nodes.append(self._scattered(child, parent, self._current(parent), nodes[-1]))
        root = chain[-1]
        root.version += 1
        for item, new in zip(chain, nodes, strict=True):
            item.node, item.version = new, root.version
        for other in root.memory.roots if root.memory is not None else ():
            if other is not root:
                self._overwrite(other, root)

    def _entry_of(self, x: torch.Tensor) -> Entry | None:
        known = self._known.get(id(x))
        return known[1] if known is not None and known[0]() is x else None

    def _current(self, entry: Entry) -> fx.Node:
        if entry.source is not None and entry.version != entry.root.version:
            if entry.op is _aten.alias.default:
                entry.node, entry.version = self._current(entry.source), entry.root.version
                return entry.node
            value = torch.empty_strided(entry.geometry[0], entry.geometry[1], dtype=entry.geometry[3], device="meta")
            node = self._emit(entry.op, (self._current(entry.source), *entry.args), entry.kwargs, value)
            entry.node = node if entry.index is None else self._emit(operator.getitem, (node, entry.index), {}, value)
            entry.version = entry.root.version
        return entry.node

    def _unknown(self, x: torch.Tensor) -> fx.Node:
        memory = self._memory_of(x)
        for root in memory.roots if memory is not None and memory.alive else ():
            if root.geometry == _geometry(x):
                entry = Entry(root.node, root.geometry, memory, root, _aten.alias.default, (), {}, version=root.version)
                self._add(x, entry)
                return entry.node
        node = self._constant(x)
        self._add(x, Entry(node, _geometry(x), memory))
        return node

    def _scattered(self, child: Entry, parent: Entry, whole: fx.Node, part: fx.Node) -> fx.Node:
        """The parent's entries once those of a view of it are `part`."""
        value = torch.empty_strided(parent.geometry[0], parent.geometry[1], dtype=parent.geometry[3], device="meta")
        name = child.op._schema.name.split("::")[1]
        if name in _SCATTERS:
            scatter = getattr(_aten, _SCATTERS[name]).default
            return self._emit(scatter, (whole, part, *child.args), child.kwargs, value)
        if name == "unbind":
            dim = child.args[0] if child.args else 0
            return self._emit(_aten.select_scatter.default, (whole, part, dim, child.index), {}, value)
        if name in ("view_as_real", "view_as_complex"):
            back = _aten.view_as_complex if name == "view_as_real" else _aten.view_as_real
            return self._emit(back.default, (part,), {}, value)
        if child.geometry[3] != parent.geometry[3]:
            return self._emit(_aten.view.dtype, (part, parent.geometry[3]), {}, value)
        if name in _RESHAPES and value.numel() == torch.Size(child.geometry[0]).numel():
            return self._emit(_aten.reshape.default, (part, list(parent.geometry[0])), {}, value)
        if name == "t":
            return self._emit(_aten.t.default, (part,), {}, value)
        if name == "transpose":
            return self._emit(_aten.transpose.int, (part, *child.args), child.kwargs, value)
        if name == "permute":
            order = [dim % len(child.args[0]) for dim in child.args[0]]
            return self._emit(_aten.permute.default, (part, [order.index(i) for i in range(len(order))]), {}, value)
        return self._by_places(child, parent, whole, part, value)

    def _by_places(self, child: Entry, parent: Entry, whole: fx.Node, part: fx.Node, value: torch.Tensor) -> fx.Node:
        """Any view: where its entries lie in the parent is found by viewing the parent's numbered places."""
        places = torch.arange(value.numel()).reshape(parent.geometry[0])
        viewed = child.op(places, *child.args, **child.kwargs)
        viewed = viewed if child.index is None else viewed[child.index]
        return self._put(whole, viewed.reshape(-1), part, value)

    def _put(self, whole: fx.Node, places: torch.Tensor, part: fx.Node, value: torch.Tensor) -> fx.Node:
        flat, count = value.new_empty(value.numel()), places.numel()
        line = self._emit(_aten.reshape.default, (whole, [-1]), {}, flat)
        new = self._emit(_aten.reshape.default, (part, [-1]), {}, value.new_empty(count))
        put = self._emit(_aten.index_put.default, (line, [self._constant(places)], new), {}, flat)
        return self._emit(_aten.reshape.default, (put, list(value.shape)), {}, value)

    def _overwrite(self, other: Entry, root: Entry) -> None:
        """Another view of the same memory, made out of sight, sees what was written to `root`."""
        if other.geometry[3] != root.geometry[3]:
            return
        mine, theirs = _places(root.geometry), _places(other.geometry)
        there = torch.isin(theirs, mine).nonzero().reshape(-1)
        if not there.numel():
            return
        order = mine.argsort()
        here = order[torch.searchsorted(mine[order], theirs[there])]
        value = torch.empty(other.geometry[0], dtype=other.geometry[3], device="meta")
        source = torch.empty(root.geometry[0], dtype=root.geometry[3], device="meta")
        line = self._emit(_aten.reshape.default, (root.node, [-1]), {}, source.reshape(-1))
        taken = self._emit(_aten.index_select.default, (line, 0, self._constant(here)), {}, source.new_empty(len(here)))
        other.node = self._put(other.node, there, taken, value)
        other.version += 1

    def _memory_of(self, x: torch.Tensor) -> Memory | None:
        address = _address(x)
        return None if address is None else self._memories.setdefault(address, Memory())

    def _add(self, x: torch.Tensor, entry: Entry) -> None:
        key, memory = id(x), entry.memory
        known = self._known

        def gone(reference: Any) -> None:
            if key in known and known[key][0] is reference:
                del known[key]
                if memory is not None:
                    memory.alive.pop(key, None)

        reference = weakref.ref(x, gone)
        known[key] = (reference, entry)
        if memory is not None:
            memory.alive[key] = reference
            if entry.source is None:
                memory.roots.append(entry)

    def _forget(self, x: torch.Tensor) -> None:
        known = self._known.pop(id(x), None)
        if known is not None and known[1].memory is not None:
            known[1].memory.alive.pop(id(x), None)


def shares_memory(x: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors lie in the same storage."""
    address = _address(x)
    return address is not None and address == _address(other)


def _address(x: torch.Tensor) -> int | None:
    if x.layout is not torch.strided or x.is_quantized:
        return None
    try:
        return int(x.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):  # tensors that wrap others have no storage of their own
        return None


def _geometry(x: torch.Tensor) -> tuple[Any, ...]:
    if _address(x) is None:
        return (tuple(x.shape) if not x.is_nested else (), None, 0, x.dtype)
    return (tuple(x.shape), tuple(x.stride()), x.storage_offset(), x.dtype)


def _places(geometry: tuple[Any, ...]) -> torch.Tensor:
    """Where the entries lie in the storage, in their own order."""
    shape, stride, offset, _ = geometry
    places = torch.full(shape, offset)
    for dim, (size, step) in enumerate(zip(shape, stride, strict=True)):
        places += (torch.arange(size) * step).reshape([-1 if i == dim else 1 for i in range(len(shape))])
    return places.reshape(-1)
