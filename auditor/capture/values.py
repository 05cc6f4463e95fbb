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
    """All tensors of a run, with their nodes. constant(tensor) -> node adds a tensor of unknown origin."""

    def __init__(self, emit: Emit, constant: Constant) -> None:
        self._emit, self._constant = emit, constant
        self._known: dict[int, tuple[weakref.ref[torch.Tensor], Entry]] = {}
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
        parent, geometry = self._entry(source), geometry_of(x)
        if view is None or view.op is _aten.as_strided.default:
            views = ((entry, find_view(geometry, entry.geometry)) for entry in parent.chain)
            within = next(((entry, view) for entry, view in views if view is not None), None)
            if within is None:  # not a view of any tensor in the chain
                self.bind(x, node)
                return
            parent, view = within
            if parent.chain[-1].version:  # a written tensor has another layout in a replay
                node = read(self._emit, self._constant, view, geometry, parent.geometry, self._current(parent))
        above = parent.source
        same = above is not None and parent.view.reshapes(parent.geometry, above.geometry)
        if above is not None and same and view.reshapes(geometry, parent.geometry):  # keeps chains short
            view, parent = View(_aten.reshape.default, (list(geometry.shape),)), above
        self._add(x, Entry(node, geometry, parent.memory, parent, view, parent.chain[-1].version))

    def update_storage(self, x: torch.Tensor) -> None:
        """Update the entry of `x` after `x` got another storage, possibly another tensor's."""
        self._known.pop(id(x), None)
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
            self._known.pop(id(x))
            self.bind(x, node)
            return
        *views, root = entry.chain
        root.version += 1
        for child in views:
            assert child.source is not None
            child.node, child.version = node, root.version
            whole = self._current(child.source, root.version - 1)
            own, parent = child.geometry, child.source.geometry
            node = scatter(self._emit, self._constant, child.view, own, parent, whole, node)
        root.node = node
        for other in root.memory.roots if root.memory is not None else ():
            pairs = (other.node, other.geometry), (root.node, root.geometry)
            seen = overwrite(self._emit, self._constant, *pairs) if other is not root else None
            if seen is not None:  # the new entries also appear in a view made by an operation that was not seen
                other.node, other.version = seen, other.version + 1

    def _entry_of(self, x: torch.Tensor) -> Entry | None:
        known = self._known.get(id(x))
        if known is None or known[0]() is not x:
            return None
        memory = known[1].memory
        if memory is not None and address(x) != memory.address:  # `x.data = ...`, which is no operation
            del self._known[id(x)]
            return None
        return known[1]

    def _entry(self, x: torch.Tensor) -> Entry:
        if (known := self._entry_of(x)) is not None:
            return known
        memory, geometry = self._memory_of(x), geometry_of(x)
        for root in memory.roots if memory is not None else ():
            view = find_view(geometry, root.geometry)
            if view is not None:
                node = read(self._emit, self._constant, view, geometry, root.geometry, root.node)
                entry = Entry(node, geometry, memory, root, view, root.version)
                break
        else:
            entry = Entry(self._constant(x), geometry, memory)
        self._add(x, entry)
        return entry

    def _current(self, entry: Entry, version: int | None = None) -> fx.Node:
        """The node with the tensor's entries after all writes to its memory, or after the first `version` writes."""
        chain = entry.chain
        version = chain[-1].version if version is None else version
        stale = [item for item in chain[:-1] if item.version < version]
        for item in reversed(stale):
            assert item.source is not None
            own, parent = item.geometry, item.source.geometry
            item.node = read(self._emit, self._constant, item.view, own, parent, item.source.node)
            item.version = version
        return entry.node

    def _memory_of(self, x: torch.Tensor) -> Memory | None:
        place = address(x)
        if place is None:
            return None
        memory = self._memories.get(place)
        if memory is None:
            storage = StorageWeakRef(x.untyped_storage())  # type: ignore[no-untyped-call]
            memory = self._memories[place] = Memory(place, storage)
        return memory

    def _add(self, x: torch.Tensor, entry: Entry) -> None:
        key, known = id(x), self._known

        def forget(reference: Any) -> None:
            if key in known and known[key][0] is reference:
                del known[key]

        known[key] = (weakref.ref(x, forget), entry)
        if entry.memory is not None and entry.source is None:
            entry.memory.roots.append(entry)
