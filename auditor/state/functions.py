"""What functions keep between their calls: closures, defaults, attributes, the globals that they name, and caches."""

from __future__ import annotations

import functools
import gc
import sys
import sysconfig
import types
from collections import deque
from collections.abc import Iterator
from functools import cache
from itertools import islice
from typing import Any

import torch

from .attributes import OTHERS, UNSET, Kind
from .contents import kinds_of

_ACCESSORS = {
    staticmethod: ("__func__",),
    classmethod: ("__func__",),
    property: ("fget", "fset", "fdel"),
    functools.cached_property: ("func",),
    functools.partial: ("func", "args", "keywords"),
    types.MethodType: ("__func__", "__self__"),
}
_INSTALLED = (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))
_CODE = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType)
_CONTAINERS = (list, dict, set, deque)
_CELLS = 3
"""Where the closure begins in what is read of a function: defaults, those by keyword and attributes come before."""
_DEPTH = 4
"""From a cache to the tensors in a list in it: its table, an entry, the result, the tensor."""


def held_by_code(value: Any, hook: bool) -> Iterator[tuple[Any, Kind]]:
    """The places in which a function, or what wraps one, keeps something, each with how it is read.

    None for functions of packages: there are thousands behind a model of theirs, and state is not what they keep. What
    hooks close over is their store; what other functions do is put back where tensors are among it, and else left to
    whoever counts or logs there.
    """
    cls = type(value)
    if cls in _ACCESSORS:
        yield value, _ACCESSOR
    elif cls is functools._lru_cache_wrapper and _is_foreign(value.__module__):
        yield value, _CACHED
    elif cls is types.FunctionType and is_users(value.__module__):
        yield value, _HOOK if hook else _FUNCTION
        if not hook:
            yield from ((kept, _with_tensors(kind)) for kept in _containers(value) for kind in kinds_of(type(kept)))
        yield from ((space, _named(value.__code__)) for space in _spaces(value))


@cache
def is_users(module: str | None) -> bool:
    """Whether a module is neither part of torch, nor of the standard library or of an installed package."""
    file = getattr(sys.modules.get(module or ""), "__file__", None) or ""
    return _is_foreign(module) and not file.startswith(_INSTALLED)


def _is_foreign(module: str | None) -> bool:
    return (module or "").partition(".")[0] not in OTHERS


def _spaces(function: types.FunctionType) -> Iterator[dict[str, Any]]:
    """Where the names in a function lead: to its globals, and into the user's modules among these."""
    yield function.__globals__
    for name in _names(function.__code__):
        value = function.__globals__.get(name)
        if type(value) is types.ModuleType and is_users(value.__name__):
            yield vars(value)


@cache
def _names(code: types.CodeType) -> tuple[str, ...]:
    """What may be a global or an attribute of a module, in the functions inside too."""
    inner = (name for item in code.co_consts if isinstance(item, types.CodeType) for name in _names(item))
    return tuple(dict.fromkeys((*code.co_names, *inner)))


@cache
def _named(code: types.CodeType) -> Kind:
    names = _names(code)

    def read(space: dict[str, Any]) -> list[Any]:
        return [space.get(name, UNSET) for name in names]

    def write(space: dict[str, Any], held: list[Any]) -> None:
        for name, value in zip(names, held, strict=True):
            if value is not UNSET:
                space[name] = value
            else:
                space.pop(name, None)

    return Kind(read, write)


def _read_function(owner: types.FunctionType) -> list[Any]:
    return [owner.__defaults__, owner.__kwdefaults__, owner.__dict__, *map(_content, owner.__closure__ or ())]


def _write_hook(owner: types.FunctionType, held: list[Any]) -> None:
    owner.__defaults__, owner.__kwdefaults__, owner.__dict__, *contents = held
    for cell, value in zip(owner.__closure__ or (), contents, strict=True):
        if value is not UNSET:
            cell.cell_contents = value
        elif _content(cell) is not UNSET:
            del cell.cell_contents


def _write_function(owner: types.FunctionType, held: list[Any]) -> None:
    pairs = zip(held[_CELLS:], _read_function(owner)[_CELLS:], strict=True)
    _write_hook(
        owner, [*held[:_CELLS], *(before if _leads_to_a_tensor([before, now]) else now for before, now in pairs)]
    )


def _containers(function: types.FunctionType) -> Iterator[Any]:
    return (kept for kept in map(_content, function.__closure__ or ()) if isinstance(kept, _CONTAINERS))


def _past_containers(held: list[Any]) -> Iterator[Any]:
    return (kept for index, kept in enumerate(held) if index < _CELLS or not isinstance(kept, _CONTAINERS))


@cache
def _with_tensors(kind: Kind) -> Kind:
    """The same for a container that is put back only where tensors are or were in it."""

    def write(owner: Any, held: list[Any]) -> None:
        if _leads_to_a_tensor([held, kind.read(owner)]):
            kind.write(owner, held)

    return Kind(kind.read, write, kind.leads)


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return UNSET


def _read_accessor(owner: Any) -> list[Any]:
    return [getattr(owner, name, None) for name in _ACCESSORS[type(owner)]]


def _read_cached(owner: Any) -> list[Any]:
    return [owner.__wrapped__, owner.cache_info().misses]


def _write_cached(owner: Any, held: list[Any]) -> None:
    """A cache can't be given its old entries, but it can forget: tensors that a run put there may be low ones."""
    entries = [item for item in gc.get_referents(owner) if item is not owner.__dict__]
    if owner.cache_info().misses != held[1] and _leads_to_a_tensor(entries):
        owner.cache_clear()


def _leads_to_a_tensor(found: list[Any]) -> bool:
    for _ in range(_DEPTH):
        if any(isinstance(item, torch.Tensor) for item in found):
            return True
        found = gc.get_referents(*(item for item in found if not isinstance(item, _CODE)))
    return False


_HOOK = Kind(_read_function, _write_hook)
_FUNCTION = Kind(_read_function, _write_function, _past_containers)
_ACCESSOR = Kind(_read_accessor, lambda owner, held: None)
_CACHED = Kind(_read_cached, _write_cached, lambda held: islice(held, 1))
