"""A model that comes back as it was, whatever a body did to it: copies are not to be had of every model."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from .members import modules_of, parameters_of


@contextmanager
def restored(model: nn.Module) -> Iterator[None]:
    """Whatever the body converts, wraps, sets or registers: every module comes back with the same objects and bits.

    Attributes, hooks, parameters, their storage and their gradients are the very ones they were. Buffers that the body
    sees are copies, so it may write into them, tied as the originals are. Only what it writes into a parameter in place,
    without converting it first, stays.
    """
    modules = modules_of(model)
    stores = [s for module in modules for s in (vars(module), *filter(_is_store, vars(module).values()))]
    kept = [(store, dict(store)) for store in stores]
    parameters = [(parameter, parameter.data, parameter.grad) for parameter in parameters_of(model)]
    scripted = [(m._buffers, list(m._buffers.items())) for m in modules if isinstance(m, torch.jit.ScriptModule)]
    try:
        _own_buffers(modules)
        for parameter, _, _ in parameters:
            parameter.grad = None  # a conversion would convert it too
        yield
    finally:
        for parameter, data, gradient in parameters:
            parameter.data, parameter.grad = data, gradient
        for store, content in kept:
            _put_back(store, content)
        for buffers, held in scripted:  # theirs lie in C++
            _replace(buffers, held)


def _is_store(value: object) -> bool:
    """Whether an attribute is a dictionary: one that nn.Module keeps its members and hooks in, or the user's own."""
    return type(value) in (dict, OrderedDict)


def _put_back(store: dict[str, Any], content: Mapping[str, Any]) -> None:
    if list(store) != list(content) or any(store[key] is not value for key, value in content.items()):
        store.clear()
        store.update(content)


def _own_buffers(modules: list[nn.Module]) -> None:
    """Copies in place of the buffers: one made once where modules share it, one storage where buffers share that."""
    known: dict[int, torch.Tensor] = {}
    detached = [
        {key: None if b is None else known.setdefault(id(b), b.detach()) for key, b in module._buffers.items()}
        for module in modules
    ]
    for module, own in zip(modules, copy.deepcopy(detached), strict=True):
        _replace(module._buffers, own.items())


def _replace(buffers: Any, held: Iterable[tuple[str, torch.Tensor | None]]) -> None:
    for name, buffer in held:
        buffers[name] = buffer
