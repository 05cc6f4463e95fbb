"""Maps each tensor of a run to the graph node with its current entries, while tensors are viewed, written and freed."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.multiprocessing.reductions import StorageWeakRef

from .views import ALIAS, Constant, Emit, Geometry, View, address, find_view, geometry_of, overwrite, read, scatter

_aten = torch.ops.aten


@dataclass(eq=False)
class Memory:
    """A storage. roots: tensors in the storage that are not views of another known tensor.

    `storage`, a weak reference, prevents that another storage gets this address, even after Python freed the tensors.
    """

    address: int
    storage: StorageWeakRef
    roots: list[Entry] = field(default_factory=list)


@dataclass(eq=False)
class Entry:
    """A tensor of the run. node: computes the tensor's entries after `version` writes to the root (the last of
    `chain`). source, view: the tensor of which it is a view, and the View."""

    node: fx.Node
    geometry: Geometry
    memory: Memory | None
    source: Entry | None = None
    view: View = ALIAS
    version: int = 0

    @property
    def chain(self) -> list[Entry]:
        """This entry, the entry of the tensor that it views, and so on."""
        result = [self]
        while result[-1].source is not None:
            result.append(result[-1].source)
        return result


class Values:
    """All tensors of a run, with their nodes. constant(tensor) -> node adds a tensor of unknown origin.

    Tensors that share memory form trees: a view's entry has its source, and the last source is the root. A write to any
    of them changes the whole root at once; other views of the root are computed from it when they are next read.
    """

    def __init__(self, emit: Emit, constant: Constant) -> None:
        self._emit = emit
        self._constant = constant
        self._entries: dict[int, tuple[weakref.ref[torch.Tensor], Entry]] = {}  # {id of a live tensor: its entry}
        self._memories: dict[int, Memory] = {}

    def node_of(self, x: torch.Tensor) -> fx.Node:
        """The node with this tensor's current entries; an unknown tensor becomes a constant with copied entries."""
        return self._current(self._entry(x))

    def knows(self, x: torch.Tensor) -> bool:
        """Whether the tensor object `x` has a node in the graph."""
        return self._entry_of(x) is not None

    def bind(self, x: torch.Tensor, node: fx.Node) -> None:
        """Register a new tensor `x`, whose entries are the result of `node`."""
        self._add(x, Entry(node, geometry_of(x), self._memory_of(x)))

    def bind_view(self, x: torch.Tensor, node: fx.Node, source: torch.Tensor, view: View | None) -> None:
        """Register `x` as a view of `source`. view: None if the View must be derived from the memory layout.

        The source may be `x` itself before it changed shape.
        """
        parent = self._entry(source)
        geometry = geometry_of(x)
        if view is None or view.op is _aten.as_strided.default:
            viewed = _viewed_tensor(parent, geometry)
            if viewed is None:
                self.bind(x, node)
                return
            parent, view = viewed
            if parent.chain[-1].version:  # a written tensor has another layout in a replay
                node = read(self._emit, self._constant, view, geometry, parent.geometry, self._current(parent))
        parent, view = _shortest(parent, view, geometry)
        version = parent.chain[-1].version
        self._add(x, Entry(node, geometry, parent.memory, parent, view, version))

    def update_storage(self, x: torch.Tensor) -> None:
        """Update the entry of `x` after `x` got another storage, possibly another tensor's."""
        self._entries.pop(id(x), None)
        self._entry(x)

    def same(self, x: torch.Tensor, other: torch.Tensor) -> None:
        """Register `x` under the node of `other`: an operation returned `x` with the unchanged entries of `other`."""
        node = self.node_of(other)
        if address(x) is None or address(x) != address(other):
            self._add(x, Entry(node, geometry_of(x), self._memory_of(x)))
        else:
            self.bind_view(x, node, other, ALIAS)

    def write(self, x: torch.Tensor, node: fx.Node) -> None:
        """Set the node of `x` after a write; tensors that share its memory change too."""
        entry = self._entry(x)
        if entry.source is None and entry.geometry != geometry_of(x):  # an `out=` of another shape
            del self._entries[id(x)]
            self.bind(x, node)
            return
        root = self._write_up(entry, node)
        self._write_beside(root)

    def _write_up(self, entry: Entry, node: fx.Node) -> Entry:
        """Set the node of an entry, and of every tensor up to its root, which is returned."""
        *views, root = entry.chain
        root.version += 1
        for child in views:
            child.node = node
            child.version = root.version
            parent = child.source
            assert parent is not None
            # The parent's new entries: those before this write, except for the child's.
            before = self._current(parent, root.version - 1)
            own = child.geometry
            node = scatter(self._emit, self._constant, child.view, own, parent.geometry, before, node)
        root.node = node
        return root

    def _write_beside(self, root: Entry) -> None:
        """Set the nodes of other roots in the memory of a written root: views made by operations that were not seen."""
        if root.memory is None:
            return
        written = (root.node, root.geometry)
        for other in root.memory.roots:
            if other is root:
                continue
            node = overwrite(self._emit, self._constant, (other.node, other.geometry), written)
            if node is not None:
                other.node = node
                other.version += 1

    def _entry_of(self, x: torch.Tensor) -> Entry | None:
        """The entry of a registered tensor; None if the tensor is unknown or has another storage now."""
        registered = self._entries.get(id(x))
        if registered is None:
            return None
        reference, entry = registered
        if reference() is not x:
            return None
        if entry.memory is not None and address(x) != entry.memory.address:  # `x.data = ...`, which is no operation
            del self._entries[id(x)]
            return None
        return entry

    def _entry(self, x: torch.Tensor) -> Entry:
        """The entry of a tensor; an unknown tensor is registered as a view of a root in its memory, or as a constant."""
        entry = self._entry_of(x)
        if entry is not None:
            return entry
        geometry = geometry_of(x)
        memory = self._memory_of(x)
        if memory is not None:
            entry = self._view_of_root(geometry, memory)
        if entry is None:
            entry = Entry(self._constant(x), geometry, memory)
        self._add(x, entry)
        return entry

    def _view_of_root(self, geometry: Geometry, memory: Memory) -> Entry | None:
        """An entry for a tensor of this layout as a view of a root in its memory; None if no root contains it."""
        for root in memory.roots:
            view = find_view(geometry, root.geometry)
            if view is not None:
                node = read(self._emit, self._constant, view, geometry, root.geometry, root.node)
                return Entry(node, geometry, memory, root, view, root.version)
        return None

    def _current(self, entry: Entry, version: int | None = None) -> fx.Node:
        """The node with the tensor's entries after all writes to its memory, or after the first `version` writes."""
        *views, root = entry.chain
        if version is None:
            version = root.version
        stale = [child for child in views if child.version < version]
        for child in reversed(stale):  # a view is computed from its source, which is current by then
            parent = child.source
            assert parent is not None
            own = child.geometry
            child.node = read(self._emit, self._constant, child.view, own, parent.geometry, parent.node)
            child.version = version
        return entry.node

    def _memory_of(self, x: torch.Tensor) -> Memory | None:
        place = address(x)
        if place is None:
            return None
        memory = self._memories.get(place)
        if memory is None:
            storage = StorageWeakRef(x.untyped_storage())  # type: ignore[no-untyped-call]
            memory = Memory(place, storage)
            self._memories[place] = memory
        return memory

    def _add(self, x: torch.Tensor, entry: Entry) -> None:
        """Register a tensor until Python frees it; the entry remains in the trees of its views."""
        key = id(x)
        entries = self._entries

        def forget(reference: Any) -> None:
            if key in entries and entries[key][0] is reference:
                del entries[key]

        entries[key] = (weakref.ref(x, forget), entry)
        if entry.memory is not None and entry.source is None:
            entry.memory.roots.append(entry)


def _viewed_tensor(parent: Entry, geometry: Geometry) -> tuple[Entry, View] | None:
    """The first tensor in a chain of which a tensor of this layout is a view, and the View; None without one."""
    for entry in parent.chain:
        view = find_view(geometry, entry.geometry)
        if view is not None:
            return entry, view
    return None


def _shortest(parent: Entry, view: View, geometry: Geometry) -> tuple[Entry, View]:
    """The source and the View of a tensor; a reshape of a reshape becomes one reshape, which keeps chains short."""
    source = parent.source
    if source is None or not parent.view.reshapes(parent.geometry, source.geometry):
        return parent, view
    if not view.reshapes(geometry, parent.geometry):
        return parent, view
    return source, View(_aten.reshape.default, (list(geometry.shape),))
