"""Runs a model in eval mode and leaves its modules in the modes that they were in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from ..state.members import modules_of


@contextmanager
def in_eval(model: nn.Module) -> Iterator[None]:
    """`model.eval()` for the body; every module's own flag comes back. What runs write is `state.unchanged`'s to put back."""
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


def _set(module: nn.Module, flag: bool) -> None:
    """`module.training`, also of a module that takes no attributes; a frozen one has none."""
    if getattr(module, "training", None) in (None, flag):
        return
    try:
        module.training = flag
    except Exception:
        module.__dict__["training"] = flag
