"""What an object of Python holds and how it is put back in place: containers, attributes, classes and generators."""

from __future__ import annotations

import random
import threading
import weakref
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from .attributes import HOOKS, MODULE, OBJECT, SCRIPT, UNSET, Kind, is_open, leads_nowhere, slots

# No run can change them, and there are many of them.
ATOMS = frozenset(
    {int, float, bool, complex, str, bytes, type(None), range, slice, torch.dtype, torch.device, torch.Size}
)


@dataclass(frozen=True)
class Content:
    """What `owner` held at the start."""

    owner: Any
    kind: Kind
    held: list[Any]

    @property
    def children(self) -> Iterable[Any]:
        """The objects held."""
        return self.kind.leads(self.held)

    @property
    def changed(self) -> bool:
        """Whether it holds other objects now, or in another order."""
        now = self.kind.read(self.owner)
        return len(now) != len(self.held) or any(a is not b for a, b in zip(now, self.held, strict=True))

    def lend(self, instead: Mapping[int, Any]) -> None:
        """Hold others for the time being. instead: {id of an object: the one to hold}."""
        if any(id(value) in instead for value in self.held):
            self.kind.write(self.owner, [instead.get(id(value), value) for value in self.held])

    def restore(self) -> None:
        """The same objects in the same order, in the same container; one that was left alone isn't touched."""
        if self.changed:
            self.kind.write(self.owner, self.held)


def content(owner: Any, kind: Kind) -> Content:
    """What `owner` holds now."""
    return Content(owner, kind, kind.read(owner))


def kinds_of(cls: type) -> tuple[Kind, ...]:
    """How the objects of a class are read: as the container that they are, and by what hangs on them."""
    kinds = [kind for base, kind in _CONTAINERS.items() if issubclass(cls, base)][:1]
    if issubclass(cls, nn.Module):
        # The attributes first: the dicts of the hooks are among them.
        kinds += [MODULE, HOOKS]
    elif is_open(cls) and cls.__dictoffset__:
        kinds += [OBJECT]
    if issubclass(cls, torch.jit.ScriptModule):
        kinds += [SCRIPT]
    if is_open(cls):
        kinds += slots(cls)
    return tuple(kinds)


# The methods of the base classes: subclasses such as the outputs of transformers refuse to be written.
def _read_dict(owner: dict[Any, Any]) -> list[Any]:
    return [*dict.keys(owner), *dict.values(owner)]


def _write_dict(owner: dict[Any, Any], held: list[Any]) -> None:
    dict.clear(owner)
    for key, value in _pairs(held):
        dict.__setitem__(owner, key, value)


def _read_ordered(owner: OrderedDict[Any, Any]) -> list[Any]:
    keys = list(OrderedDict.keys(owner))
    return [*keys, *(dict.__getitem__(owner, key) for key in keys)]


def _write_ordered(owner: OrderedDict[Any, Any], held: list[Any]) -> None:
    OrderedDict.clear(owner)
    for key, value in _pairs(held):
        OrderedDict.__setitem__(owner, key, value)


def _pairs(held: list[Any]) -> Iterable[tuple[Any, Any]]:
    return zip(held[: len(held) // 2], held[len(held) // 2 :], strict=True)


def _write_list(owner: list[Any], held: list[Any]) -> None:
    list.__setitem__(owner, slice(None), held)


def _write_set(owner: set[Any], held: list[Any]) -> None:
    set.clear(owner)
    set.update(owner, held)


def _write_deque(owner: deque[Any], held: list[Any]) -> None:
    deque.clear(owner)
    deque.extend(owner, held)


def _read_weak(owner: Any) -> list[Any]:
    """What a dictionary that holds its keys or its values weakly has of both."""
    pairs = list(owner.items())
    return [*(key for key, _ in pairs), *(value for _, value in pairs)]


def _write_weak(owner: Any, held: list[Any]) -> None:
    owner.clear()
    for key, value in _pairs(held):
        owner[key] = value


def _write_weak_set(owner: weakref.WeakSet[Any], held: list[Any]) -> None:
    owner.clear()
    for value in held:
        owner.add(value)


def _write_array(owner: array[Any], held: list[Any]) -> None:
    owner[:] = array(owner.typecode, held)


def _write_bytes(owner: bytearray, held: list[Any]) -> None:
    owner[:] = bytes(held)


def _read_numbers(owner: np.ndarray[Any, Any]) -> list[Any]:
    """A read-only array can't change, and one that maps a file may be larger than memory."""
    return [] if not owner.flags.writeable or isinstance(owner, np.memmap) else [owner.copy()]


def _write_numbers(owner: np.ndarray[Any, Any], held: list[Any]) -> None:
    if held:
        owner[...] = held[0]


def _read_local(owner: threading.local) -> list[Any]:
    """What this thread has of it."""
    own = vars(owner)
    return [*own, *own.values()]


def _write_local(owner: threading.local, held: list[Any]) -> None:
    own = vars(owner)
    own.clear()
    own.update(_pairs(held))


def _write_variable(owner: ContextVar[Any], held: list[Any]) -> None:
    """Nothing unsets one; runs have a context of their own for that."""
    if held[0] is not UNSET:
        owner.set(held[0])


def _state_of(get: Callable[[Any], Any], put: Callable[[Any, Any], object]) -> Kind:
    def write(owner: Any, held: list[Any]) -> None:
        put(owner, held[0])

    return Kind(lambda owner: [get(owner)], write, leads_nowhere)


def _put_bits(owner: np.random.Generator, state: Any) -> None:
    owner.bit_generator.state = state


_CONTAINERS: dict[type, Kind] = {
    OrderedDict: Kind(_read_ordered, _write_ordered),
    dict: Kind(_read_dict, _write_dict),
    list: Kind(lambda owner: list(list.__iter__(owner)), _write_list),
    tuple: Kind(lambda owner: list(tuple.__iter__(owner)), lambda owner, held: None),
    frozenset: Kind(lambda owner: list(frozenset.__iter__(owner)), lambda owner, held: None),
    set: Kind(lambda owner: list(set.__iter__(owner)), _write_set),
    deque: Kind(lambda owner: list(deque.__iter__(owner)), _write_deque),
    weakref.WeakKeyDictionary: Kind(_read_weak, _write_weak),
    weakref.WeakValueDictionary: Kind(_read_weak, _write_weak),
    weakref.WeakSet: Kind(list, _write_weak_set),
    array: Kind(list, _write_array, leads_nowhere),
    bytearray: Kind(list, _write_bytes, leads_nowhere),
    threading.local: Kind(_read_local, _write_local),
    ContextVar: Kind(lambda owner: [owner.get(UNSET)], _write_variable),
    np.ndarray: Kind(_read_numbers, _write_numbers, leads_nowhere),
    torch.Generator: _state_of(torch.Generator.get_state, torch.Generator.set_state),
    random.Random: _state_of(random.Random.getstate, random.Random.setstate),
    np.random.RandomState: _state_of(np.random.RandomState.get_state, np.random.RandomState.set_state),
    np.random.Generator: _state_of(lambda owner: owner.bit_generator.state, _put_bits),
}
