"""What hangs on an object by name: its `__dict__` and slots, the attributes of its class, what TorchScript holds."""

from __future__ import annotations

import argparse
import collections
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from itertools import islice
from typing import Any

import torch
from torch import nn

_NO_HOOKS = vars(nn.Module())
_HOOKS = [name for name, held in _NO_HOOKS.items() if "_hooks" in name and isinstance(held, dict)]
_OPEN_STDLIB = (types.SimpleNamespace, argparse.Namespace, collections.UserDict, collections.UserList)
_OPEN_TORCH = ("torch.nn", "torch.optim", "torch.distributions", "torch.amp")
OTHERS = sys.stdlib_module_names | {"torch", __name__.partition(".")[0]}
UNSET = object()


def _everything(held: list[Any]) -> Iterable[Any]:
    return held


def leads_nowhere(held: list[Any]) -> Iterable[Any]:
    """What is held is no object of Python's."""
    return ()


@dataclass(frozen=True)
class Kind:
    """How an object is read as a list and written from such a list; `leads` says which of the list to open next."""

    read: Callable[[Any], list[Any]]
    write: Callable[[Any, list[Any]], None]
    leads: Callable[[list[Any]], Iterable[Any]] = _everything


def is_open(cls: type) -> bool:
    """Whether a model's or an input's state may lie in the attributes of such objects.

    Not those of the standard library and of torch's machinery (locks, loggers, graphs): a run's traces in them are
    not the model's, and undoing half of them would break them.
    """
    if issubclass(cls, (nn.Module, torch.Tensor, *_OPEN_STDLIB)):
        return True
    if issubclass(cls, type | types.ModuleType | Enum):
        return False
    package = cls.__module__.partition(".")[0]
    return cls.__module__.startswith(_OPEN_TORCH) if package == "torch" else package not in sys.stdlib_module_names


def own_classes(cls: type) -> Iterator[type]:
    """The classes that `cls` is made of and torch doesn't bring: models keep caches and counters there too."""
    for base in cls.__mro__:
        if base.__module__.partition(".")[0] not in OTHERS:
            yield base


def slots(cls: type) -> list[Kind]:
    """The attributes that classes declare with `__slots__`."""
    bases = [base for base in cls.__mro__ if "__slots__" in vars(base)]
    members = [m for base in bases for m in vars(base).values() if isinstance(m, types.MemberDescriptorType)]

    def read(owner: Any) -> list[Any]:
        return [_get(member, owner) for member in members]

    def write(owner: Any, held: list[Any]) -> None:
        for member, value, now in zip(members, held, read(owner), strict=True):
            if value is not UNSET:
                member.__set__(owner, value)
            elif now is not UNSET:
                member.__delete__(owner)

    return [Kind(read, write)] if members else []


def _get(member: types.MemberDescriptorType, owner: Any) -> Any:
    try:
        return member.__get__(owner)
    except AttributeError:
        return UNSET


def _dict_of(owner: Any) -> dict[str, Any]:
    """The true one, past what a class answers for it; one that isn't a dict can't be put back."""
    own = object.__getattribute__(owner, "__dict__")
    return own if isinstance(own, dict) else {}


def _read_object(owner: Any) -> list[Any]:
    own = _dict_of(owner)
    return [type(owner), *own, *own.values()]


def _write_object(owner: Any, held: list[Any]) -> None:
    cls, *named = held
    if type(owner) is not cls:
        object.__setattr__(owner, "__class__", cls)
    own = _dict_of(owner)
    own.clear()
    own.update(_pairs(named))


def _pairs(named: list[Any]) -> Iterator[tuple[Any, Any]]:
    return zip(named[: len(named) // 2], named[len(named) // 2 :], strict=True)


def _past_hooks(held: list[Any]) -> Iterator[Any]:
    return (value for name, value in _pairs(held[1:]) if name not in _HOOKS)


def _read_hooks(owner: nn.Module) -> list[Any]:
    held: list[Any] = []
    for hooks in _hook_dicts(owner):
        held += [len(hooks), *hooks, *hooks.values()]
    return held


def _write_hooks(owner: nn.Module, held: list[Any]) -> None:
    rest = iter(held)
    for hooks in _hook_dicts(owner):
        named = list(islice(rest, 2 * next(rest)))
        hooks.clear()
        hooks.update(_pairs(named))


def _hook_dicts(owner: nn.Module) -> list[dict[Any, Any]]:
    own = _dict_of(owner)
    return [own[name] for name in _HOOKS if isinstance(own.get(name), dict)]


def _read_class(owner: type) -> list[Any]:
    own = {name: value for name, value in vars(owner).items() if not name.startswith("__")}
    return [*own, *own.values()]


def _write_class(owner: type, held: list[Any]) -> None:
    before, now = dict(_pairs(held)), dict(_pairs(_read_class(owner)))
    for name in now.keys() - before.keys():
        type.__delattr__(owner, name)
    for name, value in before.items():
        if now.get(name, UNSET) is not value:
            type.__setattr__(owner, name, value)


def _read_script(owner: Any) -> list[Any]:
    """TorchScript keeps its attributes in C++: they are copied out, lists and dicts included."""
    values = [owner._c.getattr(name) for name in _script_names(owner)]
    return [*owner.parameters(recurse=False), *owner.children(), *values]


def _write_script(owner: Any, held: list[Any]) -> None:
    names = _script_names(owner)
    for name, value in zip(names, held[len(held) - len(names) :], strict=True):
        if owner._c.getattr(name) is not value:
            owner._c.setattr(name, value)


def _script_names(owner: Any) -> list[str]:
    concrete = getattr(owner, "_concrete_type", None)
    return [] if concrete is None else sorted(concrete.get_attributes())


OBJECT = Kind(_read_object, _write_object)
MODULE = Kind(_read_object, _write_object, _past_hooks)
HOOKS = Kind(_read_hooks, _write_hooks)
CLASS = Kind(_read_class, _write_class)
SCRIPT = Kind(_read_script, _write_script)
