"""Runs a model in eval mode and leaves its modules in the modes that they were in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress

from torch import nn


@contextmanager
def in_eval(model: nn.Module) -> Iterator[None]:
    """`model.eval()` for the body; every module's own flag comes back. What runs write is `state.unchanged`'s to put back."""
    flags = [(module, module.training) for module in model.modules()]
    with suppress(NotImplementedError):  # an exported module stays in the mode that it was exported in
        model.eval()
    try:
        yield
    finally:
        for module, flag in flags:
            module.training = flag
