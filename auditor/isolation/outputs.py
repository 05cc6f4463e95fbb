"""Collects a model's outputs: the tensors in the return value of its forward, in a fixed order."""

from __future__ import annotations

import dataclasses
import functools
import io
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.distributions import Distribution

LONE = "output"
"""Name of the output if a model returns a single tensor."""

_ENDLESS = (io.IOBase, itertools.count, itertools.cycle, itertools.repeat)
_NUMBERS = (str, bytes, bytearray, memoryview, range, bool, int, float, complex)
_CODE = (nn.Module, type, ModuleType, FunctionType, MethodType, BuiltinFunctionType, functools.partial, Enum)
_CLOSED = (*_NUMBERS, *_CODE)
"""Types that `tensor_outputs` skips: a module's tensors are not outputs, and the other types contain no tensors."""


class NamedTensors(list[torch.Tensor]):
    """A list of tensors, each with its name in the return value."""

    def __init__(self, tensors: Iterable[torch.Tensor], names: Iterable[str]) -> None:
        super().__init__(tensors)
        self.names = tuple(names)

    def each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> NamedTensors:
        """Apply a function to every tensor; returns the results under the same names."""
        return NamedTensors(map(change, self), self.names)


def on_cpu(outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """A list of the outputs on the CPU, with their names, if any."""
    moved = [x.cpu() for x in outputs]
    return NamedTensors(moved, outputs.names) if isinstance(outputs, NamedTensors) else moved


def tensor_outputs(output: Any) -> NamedTensors:
    """The tensors in `output`, depth first, each with a name: keys, fields and positions joined by dots.

    Visited: items of mappings and sequences; items of an iterator, which consumes it; fields of a dataclass; attributes
    of other objects in the order they were set, and slots; public attributes of a distribution and its base
    distributions. Each object is visited once, but a repeated list or tensor counts again. Modules, sets, endless
    iterators and Hugging Face's key-value caches are skipped. A single tensor is named LONE.
    """
    result = list(_tensors(output, "", {}))
    return NamedTensors([tensor for _, tensor in result], [name or LONE for name, _ in result])


def _tensors(value: Any, name: str, entered: dict[int, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields (name, tensor). entered: visited objects by id, kept alive so that no other object gets the id."""
    if isinstance(value, torch.Tensor):
        yield name, value
        return
    # Hugging Face's key-value caches are state for the next call, far larger than the output.
    is_cache = any(kind.__module__ == "transformers.cache_utils" for kind in type(value).__mro__)
    if value is None or isinstance(value, _CLOSED) or id(value) in entered or is_cache:
        return
    entered[id(value)] = value
    for key, part in _parts(value):
        yield from _tensors(part, f"{name}.{key}" if name else str(key), entered)
    if isinstance(value, Mapping | Sequence):
        del entered[id(value)]


def _parts(value: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, Sequence):
        fields = getattr(value, "_fields", ())
        return list(zip(fields, value, strict=True) if len(fields) == len(value) else enumerate(value))
    if isinstance(value, Iterator):
        return [] if isinstance(value, _ENDLESS) else list(enumerate(value))
    members = _members(value)
    if isinstance(value, Distribution):
        return [(name, part) for name, part in members.items() if name[0] != "_" or isinstance(part, Distribution)]
    return list(members.items())


def _members(value: Any) -> dict[str, Any]:
    """{name: value} of an object: dataclass fields, then attributes in the order they were set, then slots."""
    fields = list[str]()
    if dataclasses.is_dataclass(value):
        fields = [item.name for item in dataclasses.fields(value)]
    slots = list[str]()
    for kind in reversed(type(value).__mro__):
        declared = vars(kind).get("__slots__", ())
        slots += (declared,) if isinstance(declared, str) else declared
    attributes = getattr(value, "__dict__", {})
    own = {name: part for name, part in attributes.items() if isinstance(name, str)}
    members = dict[str, Any]()
    for name in (*fields, *own, *slots):
        members[name] = own[name] if name in own else getattr(value, name, None)
    return members
