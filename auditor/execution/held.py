"""What the nodes of a run gave, of which some is given up once it was read, and computed again where it is read again."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from torch import fx

from .. import offload as mapped
from ..numerics.entries import is_plain
from ..numerics.nodes import operation_of, tensors_of, viewed
from ..records import Capture
from .execute import RECORDED, Executor, Run

K = TypeVar("K", bound=Hashable)

_PLAIN = (torch.Tensor, torch.nn.Parameter)

SMALL = 1 << 13
"""Entries below which a result is kept: computing it again takes longer than what is gained is worth."""

DEEP = 8
"""Operations that are computed again, one on another, for one value at most."""

SHARE = 8
"""Of what is given up, one part in so many is kept of what was computed again last."""


class Held(MutableMapping[K, Any]):
    """Results by node. again(key, results): the result computed once more from others, bit for bit what it was."""

    def __init__(self, again: Callable[[K, Mapping[K, Any]], Any]) -> None:
        self._again = again
        self._held: dict[K, Any] = {}
        self._places: dict[K, int] = {}
        self._depths: dict[K, int] = {}
        self._gone: dict[K, None] = {}
        self._recent: dict[K, torch.Tensor] = {}
        self._room = 0.0

    def may_go(self, key: K, read: Sequence[K], *, view: bool = False) -> bool:
        """Whether a result may be given up: that is so from now on. read: what it is computed from; view: of one of these."""
        depth = max((self._depths.get(other, 0) for other in read), default=0) + (not view)
        if (view and not depth) or depth > DEEP:
            return False
        self._depths[key] = depth
        return True

    def give_up(self, key: K) -> None:
        """Forget a result until it is read again, where it may go."""
        if key in self._depths and key not in self._gone:
            value = self._held[key]
            self._room += value.numel() / SHARE
            self._held[key] = None
            self._gone[key] = None

    def __setitem__(self, key: K, value: Any) -> None:
        self._places.setdefault(key, len(self._places))
        self._held[key] = value

    def __getitem__(self, key: K) -> Any:
        if key not in self._gone:
            return self._held[key]
        if key not in self._recent:
            with torch.no_grad():
                self._remember(key, self._again(key, self))
        return self._recent[key]

    def _remember(self, key: K, value: torch.Tensor) -> None:
        """Among what was computed last; what lies furthest from it in the run goes first."""
        others = sorted(self._recent, key=lambda other: -abs(self._places[other] - self._places[key]))
        room = self._room - value.numel() - sum(x.numel() for x in self._recent.values())
        for other in others:
            if room >= 0:
                break
            room += self._recent.pop(other).numel()
        self._recent[key] = value

    def __delitem__(self, key: K) -> None:
        self._recent.pop(key, None)
        self._gone.pop(key, None)
        self._depths.pop(key, None)
        del self._held[key]

    def __contains__(self, key: object) -> bool:
        return key in self._held

    def __iter__(self) -> Iterator[K]:
        return iter(self._held)

    def __len__(self) -> int:
        return len(self._held)


def goes(values: Held[K], key: K, n: fx.Node, result: Any, sources: Mapping[K, Any]) -> bool:
    """Whether what a node gave may be given up from now on: it takes little to be computed again, and comes out the same.

    That is so of what is computed entry by entry, of normalisations, of copies in another order, and of views of any of these.
    sources: results that the node reads, by key.
    """
    if not isinstance(n.target, torch._ops.OpOverload) or not _is_usual(result) or n.target._schema.is_mutable:
        return False
    if torch.Tag.nondeterministic_seeded in n.target.tags:
        return False
    place = _memory(result)
    if any(place == _memory(x) for value in sources.values() for x in tensors_of(value) if is_plain(x)):
        return viewed(n) is not None and values.may_go(key, [*sources], view=True)
    if result.numel() < SMALL or result.storage_offset():
        return False
    quick = torch.Tag.pointwise in n.target.tags or operation_of(n.target).normalises or viewed(n) is not None
    return bool(quick) and values.may_go(key, [*sources])


def kept(capture: Capture, inputs: Sequence[Any]) -> Run:
    """A run of everything as it was recorded whose values are kept, but for what takes little to be computed again."""
    executor = Executor(capture.graph_module)
    if mapped.now() is not None:
        return Run({n.name: result for n, result in executor.steps(*inputs)})
    nodes = {n.name: n for n in capture.graph_module.graph.nodes}

    def again(name: str, values: Mapping[str, Any]) -> Any:
        return RECORDED.compute(nodes[name], lambda source: values[source.name])

    values = Held[str](again)
    for n, result in executor.steps(*inputs):
        values[n.name] = result
        if n.op == "call_function":
            goes(values, n.name, n, result, {source.name: values[source.name] for source in n.all_input_nodes})
            for source in executor.user_to_last_uses.get(n, ()):
                values.give_up(source.name)
    return Run(values)


def _is_usual(result: Any) -> bool:
    return (
        type(result) is torch.Tensor
        and result.dtype is torch.float32
        and result.device.type == "cpu"
        and is_plain(result)
        and result.numel() > 0
    )


def _memory(x: torch.Tensor) -> int:
    return x.untyped_storage().data_ptr() if x.numel() else 0


class Slots:
    """What autograd saves of a run: where it is a result that may be given up, or a view of one, the way to it is saved."""

    def __init__(self, values: Held[K]) -> None:
        self.values: Held[Any] = values
        self._open: list[_Slot] = []
        self._roots: dict[int, Any] = {}
        self._places: dict[Any, int] = {}
        self._alive: dict[int, set[Any]] = {}

    def hooks(self) -> AbstractContextManager[Any]:
        """In the body what autograd saves goes into slots."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, x: torch.Tensor) -> Any:
        kept = x.detach()  # `x` itself may be made hollow
        if type(x) not in _PLAIN or x.dtype is not torch.float32 or not is_plain(x) or x.device.type != "cpu":
            return kept
        slot = _Slot(kept)
        self._open.append(slot)
        return slot

    def _unpack(self, packed: Any) -> torch.Tensor:
        kept: torch.Tensor | None = packed.tensor if isinstance(packed, _Slot) else packed
        if kept is not None:
            return kept
        root: torch.Tensor = self.values[packed.root]
        if root.stride() != packed.strides:
            raise RuntimeError(f"{packed.root} is laid out otherwise than it was")
        return root.as_strided(*packed.geometry)

    def alive(self, key: Any, value: torch.Tensor) -> None:
        """A result that may go is there: it, or what it is a view of, is what a slot leads to."""
        place = _memory(value)
        self._roots.setdefault(place, (key, value.stride()))
        self._places[key] = place
        self._alive.setdefault(place, set()).add(key)

    def give_up(self, key: Any) -> None:
        """Forget a result where it may go; once all that share its memory are gone, another may lie there."""
        self.values.give_up(key)
        place = self._places.pop(key, 0)
        left = self._alive.get(place, set())
        left.discard(key)
        if not left:
            self._alive.pop(place, None)
            self._roots.pop(place, None)

    def settle(self) -> None:
        """The operation that just ran has saved all that it will."""
        for slot in self._open:
            assert slot.tensor is not None
            root = self._roots.get(_memory(slot.tensor))
            if root is not None:
                slot.lead_to(*root)
        self._open.clear()


class _Slot:
    """A tensor, or how it lies in the memory of a result that can be computed again."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor: torch.Tensor | None = tensor
        self.root: Any = None
        self.strides: tuple[int, ...] = ()
        self.geometry: tuple[tuple[int, ...], tuple[int, ...], int] = ((), (), 0)

    def lead_to(self, root: Any, strides: tuple[int, ...]) -> None:
        x = self.tensor
        assert x is not None
        self.root, self.strides = root, strides
        self.geometry = tuple(x.shape), tuple(x.stride()), int(x.storage_offset())
        self.tensor = None


def hollow(x: torch.Tensor) -> None:
    """Give back the memory of a tensor that only its place in an autograd graph is needed of: its shape is left."""
    x.data = torch.empty((), dtype=x.dtype, device=x.device).expand(x.shape)
