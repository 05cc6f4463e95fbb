"""Context managers that restore the process, and a model with its inputs, train/eval mode and precision."""

from __future__ import annotations

import argparse
import collections
import sys
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache, partial
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import nn

from ..errors import AuditorError
from .members import modules_of, raise_in_place, stored_low
from .process import process_state, reseed
from .tensors import StorageCopies, TensorState, plain_torch

_Slot = types.MemberDescriptorType
_OPEN_STDLIB = (types.SimpleNamespace, argparse.Namespace, collections.UserDict, collections.UserList)
_OPEN_TORCH = ("torch.nn", "torch.optim", "torch.distributions", "torch.amp")
_EMPTY: list[Any] = []  # the contents of every empty container: most are empty, and lists cost garbage collections
# Immutable and frequent: not visited.
_ATOMS = frozenset(
    {int, float, bool, complex, str, bytes, type(None), range, slice, torch.dtype, torch.device, torch.Size}
)


@contextmanager
def isolate(*roots: Any, seed: int | None = None) -> Iterator[None]:
    """Restore `roots` (models, batches, or other objects that may be written) and the process after the `with` block.

    Restored: values and identity of parameters, buffers, gradients, flags, hooks, submodules and attributes, also
    inside lists, tuples, dicts, sets, deques, arrays, generators and objects; the random
    generators of Python, NumPy, torch and the GPUs in use; process-wide settings, see process.py. seed: initial seed of
    these generators. Not restored: state in closures, globals, classes, function caches, iterators, threads and C++
    objects; a tensor's previous `grad_fn`. Call `backward()` in the block: tensors that autograd saved are overwritten
    afterwards. Results that the block stored in a root are removed from the root. Cost: buffers are copied at the
    start, and other tensors too if all have at most `AT_ONCE` bytes in total; otherwise just before a write to them.
    Raises: AuditorError(slug="state-not-restored") if restoring fails; an exception of the block is raised instead,
    with a note.
    """
    process = process_state()
    with plain_torch():
        snapshot = _Snapshot(roots)
    try:
        if seed is not None:
            reseed(seed)
        with snapshot.memory.saved_before_written():
            yield
    except BaseException as error:
        for problem in snapshot.restore(process):
            error.add_note(problem)
        raise
    if problems := snapshot.restore(process):
        raise AuditorError("\n".join(problems), slug="state-not-restored")


@contextmanager
def in_mode(model: nn.Module, training: bool) -> Iterator[None]:
    """In the body, the model is in training or eval mode; afterwards, every module's `training` flag is restored. Other
    changes are restored by `isolate`."""
    with ExitStack() as stack:
        for module in modules_of(model):
            if (flag := getattr(module, "training", None)) is not None:
                stack.callback(_set, module, flag)
        switch(model, training)
        yield


in_eval, in_training = partial(in_mode, training=False), partial(in_mode, training=True)


def switch(model: nn.Module, training: bool) -> None:
    """Call `model.train()` or `model.eval()`; if that raises, as it does for exported modules, set only the flags."""
    try:
        model.train() if training else model.eval()
    except Exception:
        for module in modules_of(model):
            _set(module, training)


def _set(module: nn.Module, flag: bool) -> None:
    """Set `module.training`, even if the module rejects attributes; a frozen module without the flag is skipped."""
    if getattr(module, "training", flag) is not flag:
        try:
            module.training = flag
        except Exception:
            module.__dict__["training"] = flag


@contextmanager
def in_fp32(model: nn.Module, which: str = "weights") -> Iterator[None]:
    """In the body, low-precision tensors of the model are FP32; then they are restored bit for bit, in the same memory.

    which: the tensors to convert, a value of Subject.upcast.
    """
    tensors = stored_low(model, attributes=which == "attributes") if which in ("weights", "attributes") else []
    with ExitStack() as stack:
        for state in map(TensorState, tensors):
            stack.callback(state.restore_gradient)
            stack.callback(state.restore)
        for x in tensors:
            x.grad = None  # its dtype will differ from the tensor's
        raise_in_place(tensors)
        yield


class _Snapshot:
    """All objects that are reachable from the given roots, with their contents at the time of the snapshot."""

    def __init__(self, roots: Iterable[Any]) -> None:
        self.memory = StorageCopies()
        self._seen: dict[int, Any] = {}
        self._contents: list[tuple[Any, _Kind, list[Any]]] = []
        self._tensors: list[TensorState] = []
        waiting = [*roots]
        while waiting:
            value = waiting.pop()
            if type(value) not in _ATOMS and id(value) not in self._seen:
                self._seen[id(value)] = value
                waiting += self._open(value)

    def restore(self, process: Callable[[], None]) -> list[str]:
        """Restore everything, `process` last; returns descriptions of objects that could not be restored.

        Gradients are restored after tensors, since torch checks them against their tensor.
        """
        tensors = (state.restore for state in self._tensors)
        contents: Iterator[Callable[[], None]] = (partial(_put_back, *content) for content in self._contents)
        gradients = (state.restore_gradient for state in self._tensors)
        problems = []
        with plain_torch():
            for step in chain(tensors, contents, gradients):
                try:
                    step()
                except Exception as error:  # one failure must not prevent the others
                    problems.append(f"{type(error).__name__}: {error}")
            problems += self.memory.restore()
        process()
        return problems

    def _open(self, value: Any) -> Iterator[Any]:
        if isinstance(value, torch.Tensor):
            state = TensorState(value)
            self._tensors.append(state)
            self.memory.watch(value)
            yield from state.children
        elif isinstance(value, nn.Module):
            stores = value._parameters, value._buffers, value._modules
            for store in stores:
                yield from (member for _, member in store.items())  # TorchScript's dicts have no values()
            self.memory.save([buffer for _, buffer in value._buffers.items() if buffer is not None])
        for kind in _kinds_of(type(value)):  # type: ignore[arg-type]
            items = kind.read(value) or _EMPTY
            self._contents.append((value, kind, items))
            yield from items if kind.leads else ()


@dataclass(frozen=True)
class _Kind:
    """Functions that read an object's contents as a list and write them back. leads: to visit the items as well."""

    read: Callable[[Any], list[Any]]
    write: Callable[[Any, list[Any]], object] = lambda owner, held: None
    leads: bool = True


def _put_back(owner: Any, kind: _Kind, original_items: list[Any]) -> None:
    """Write the original items back into a container, in their order, unless the container is unchanged."""
    now = kind.read(owner)
    if len(now) != len(original_items) or any(a is not b for a, b in zip(now, original_items, strict=True)):
        kind.write(owner, original_items)


@lru_cache(maxsize=1024)
def _kinds_of(cls: type) -> list[_Kind]:
    """Functions that read and write objects of a class, as containers and by their attributes."""
    result = [kind for base, kind in _CONTAINERS.items() if issubclass(cls, base)][:1]
    if _is_open(cls):
        if cls.__dictoffset__:
            result.append(_Kind(_read_object, _write_object))
        if slots := [name for base in cls.__mro__ for name, x in vars(base).items() if isinstance(x, _Slot)]:
            result.append(_Kind(partial(_read_slots, slots), partial(_write_slots, slots)))
    return result


def _is_open(cls: type) -> bool:
    """Whether the attributes of objects of this class may contain state of a model or an input.

    Excluded are the standard library and torch's internals (locks, loggers, graphs): their changes do not belong to the
    model, and a partial restoration would break them.
    """
    if issubclass(cls, (nn.Module, torch.Tensor, *_OPEN_STDLIB)):
        return True
    if issubclass(cls, type | types.ModuleType | types.FunctionType | Enum):
        return False
    package = cls.__module__.partition(".")[0]
    return cls.__module__.startswith(_OPEN_TORCH) if package == "torch" else package not in sys.stdlib_module_names


def _pairs(items: list[Any]) -> Iterator[tuple[Any, Any]]:
    """(key, value) pairs from a list of all keys followed by all values."""
    return zip(items[: len(items) // 2], items[len(items) // 2 :], strict=True)


def _dict_of(owner: Any) -> dict[str, Any]:
    """The object's `__dict__`, even if its class overrides attribute access; {} if `__dict__` is not a dict."""
    own = object.__getattribute__(owner, "__dict__")
    return own if isinstance(own, dict) else {}


def _read_object(owner: Any) -> list[Any]:
    own = _dict_of(owner)
    return [type(owner), *own, *own.values()]


def _write_object(owner: Any, items: list[Any]) -> None:
    cls, *named = items
    if type(owner) is not cls:
        object.__setattr__(owner, "__class__", cls)
    own = _dict_of(owner)
    own.clear()
    own.update(_pairs(named))


def _read_slots(names: list[str], owner: Any) -> list[Any]:
    values = {name: getattr(owner, name) for name in names if hasattr(owner, name)}
    return [*values, *values.values()]


def _write_slots(names: list[str], owner: Any, values: list[Any]) -> None:
    for name in names:
        if hasattr(owner, name):
            object.__delattr__(owner, name)
    for name, value in _pairs(values):
        object.__setattr__(owner, name, value)


# These functions call methods of the base classes, since subclasses such as transformers' outputs refuse writes.
def _read_dict(owner: dict[Any, Any]) -> list[Any]:
    if type(owner) is dict:
        return [*owner, *owner.values()]
    keys = list(_base(owner).__iter__(owner))
    return [*keys, *(dict.__getitem__(owner, key) for key in keys)]


def _write_dict(owner: dict[Any, Any], items: list[Any]) -> None:
    _base(owner).clear(owner)
    for key, value in _pairs(items):
        _base(owner).__setitem__(owner, key, value)


def _base(owner: dict[Any, Any]) -> type[dict[Any, Any]]:
    return OrderedDict if isinstance(owner, OrderedDict) else dict


def _refill(base: Any, add: Callable[..., object]) -> Callable[[Any, list[Any]], None]:
    def write(owner: Any, held: list[Any]) -> None:
        base.clear(owner)
        add(owner, held)

    return write


def _read_buffers(owner: torch.jit.ScriptModule) -> list[Any]:
    return [part for item in owner._buffers.items() for part in item]


def _write_buffers(owner: torch.jit.ScriptModule, items: list[Any]) -> None:
    for name, buffer in zip(items[::2], items[1::2], strict=True):
        owner._buffers[name] = buffer


def _read_array(owner: np.ndarray[Any, Any]) -> list[Any]:
    """Read a NumPy array. Read-only arrays are skipped: they cannot change, and may map a file larger than memory."""
    return [] if not owner.flags.writeable or isinstance(owner, np.memmap) else [owner.copy()]


_CONTAINERS: dict[type, _Kind] = {
    dict: _Kind(_read_dict, _write_dict),
    list: _Kind(
        lambda owner: list(list.__iter__(owner)), lambda owner, held: list.__setitem__(owner, slice(None), held)
    ),
    tuple: _Kind(lambda owner: list(tuple.__iter__(owner))),
    frozenset: _Kind(lambda owner: list(frozenset.__iter__(owner))),
    set: _Kind(lambda owner: list(set.__iter__(owner)), _refill(set, set.update)),
    deque: _Kind(lambda owner: list(deque.__iter__(owner)), _refill(deque, deque.extend)),
    np.ndarray: _Kind(_read_array, lambda owner, held: owner.__setitem__(..., held[0]), leads=False),
    torch.Generator: _Kind(
        lambda owner: [owner.get_state()], lambda owner, held: owner.set_state(held[0]), leads=False
    ),
    torch.jit.ScriptModule: _Kind(_read_buffers, _write_buffers),
}
