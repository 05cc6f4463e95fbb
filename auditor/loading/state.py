"""What a model is switched to or given before it is run: the mode of its modules, the weights of lazy ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_map_only

from ..isolation.members import modules_of, named_tensors
from ..isolation.process import reseed
from ..records import Batch


@contextmanager
def in_eval(model: nn.Module) -> Iterator[None]:
    """`model.eval()` for the body; every module's own flag comes back. What runs write is `isolated`'s to put back."""
    flags = [(module, flag) for module in modules_of(model) if (flag := getattr(module, "training", None)) is not None]
    switch(model, training=False)
    try:
        yield
    finally:
        for module, flag in flags:
            _set(module, flag)


def switch(model: nn.Module, training: bool) -> None:
    """`model.train()` or `model.eval()`, module by module where that raises.

    An exported module refuses, one that is linked to from below calls itself without end, and an author's own may raise.
    """
    waiting, seen = [model], set[int]()
    while waiting:
        module = waiting.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        try:
            module.train() if training else module.eval()
        except Exception:
            _set(module, training)
            waiting.extend(child for child in module._modules.values() if child is not None)


def materialise(model: nn.Module, batch: Batch, seed: int) -> None:
    """Lazy layers take their shape, and their first weights, from a first call: the same ones in every process."""
    if any(is_lazy(x) for _, x in named_tensors(model)):
        reseed(seed)
        args, kwargs = tree_map_only(torch.Tensor, torch.clone, batch)
        with torch.no_grad():
            model(*args, **kwargs)


def _set(module: nn.Module, flag: bool) -> None:
    """`module.training`, also of a module that takes no attributes; a frozen one has none."""
    if getattr(module, "training", None) in (None, flag):
        return
    try:
        module.training = flag
    except Exception:
        module.__dict__["training"] = flag
