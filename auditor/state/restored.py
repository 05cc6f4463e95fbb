"""A model that comes back as it was, whatever a body did to it: copies are not to be had of every model."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from .members import modules_of, parameters_of
from .storages import Role, Storages, memory, plain_torch


@contextmanager
def restored(model: nn.Module) -> Iterator[None]:
    """Whatever the body converts, wraps, sets or registers: every module comes back with the same objects and bits.

    Attributes, hooks, parameters, their storage and their gradients are the very ones they were, and so are buffers and
    what the body writes into them. Only what it writes into a parameter in place, without converting it first, stays.
    Nothing is copied for the body to see: what shares memory, a buffer with a parameter or with a plain attribute,
    shares it there too.
    """
    modules = modules_of(model)
    stores = [s for module in modules for s in (vars(module), *filter(_is_store, vars(module).values()))]
    kept = [(store, dict(store)) for store in stores]
    parameters = [(parameter, parameter.data, parameter.grad) for parameter in parameters_of(model)]
    scripted = [(m._buffers, list(m._buffers.items())) for m in modules if isinstance(m, torch.jit.ScriptModule)]
    memories = _written_to(modules)
    try:
        for parameter, _, _ in parameters:
            parameter.grad = None  # a conversion would convert it too
        with memories.saved_before_written():
            yield
    finally:
        for parameter, data, gradient in parameters:
            parameter.data, parameter.grad = data, gradient
        for store, content in kept:
            _put_back(store, content)
        for buffers, held in scripted:  # theirs lie in C++
            for name, buffer in held:
                buffers[name] = buffer
        with plain_torch():
            list(memories.restore())


def _written_to(modules: list[nn.Module]) -> Storages:
    """The memory of the buffers, as it is now."""
    found = Storages()
    with plain_torch():
        for buffer in (buffer for module in modules for _, buffer in module._buffers.items() if buffer is not None):
            found.add(memory(buffer), Role.BUFFER)
        found.copy_small()
    return found


def _is_store(value: object) -> bool:
    """Whether an attribute is a dictionary: one that nn.Module keeps its members and hooks in, or the user's own."""
    return type(value) in (dict, OrderedDict)


def _put_back(store: dict[str, Any], content: Mapping[str, Any]) -> None:
    if list(store) != list(content) or any(store[key] is not value for key, value in content.items()):
        store.clear()
        store.update(content)
