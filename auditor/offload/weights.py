"""The tensors of a model in hand, moved into mapped files one after the other."""

from __future__ import annotations

import itertools
from collections import defaultdict

import torch
from torch import nn

from .arena import Arena
from .spilling import is_large, is_mapped, laid_as


def onto(model: nn.Module, arena: Arena, large: int) -> int:
    """Put every parameter and buffer of at least `large` bytes into the arena, where it is the same object with the same
    entries; bytes moved.

    Tensors over one storage stay over one storage. The memory they had is given back as soon as nothing else holds it.
    """
    together: defaultdict[int, dict[int, torch.Tensor]] = defaultdict(dict)
    for tensor in itertools.chain(model.parameters(), model.buffers()):
        if is_large(tensor, large) and not is_mapped(tensor.untyped_storage()):
            together[tensor.untyped_storage()._cdata][id(tensor)] = tensor
    before = arena.written
    while together:
        _, tensors = together.popitem()
        storage = arena.copy_of(next(iter(tensors.values())).untyped_storage())
        for tensor in tensors.values():
            tensor.data = laid_as(tensor, storage)
    return arena.written - before
