"""Runs a model without leaving a trace: its train/eval flags and buffers are put back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def in_eval(model: nn.Module) -> Iterator[None]:
    """`model.eval()` for the body; every module's own flag, buffer objects and buffer values come back."""
    flags = {module: module.training for module in model.modules()}
    buffers = {module: dict(module._buffers) for module in model.modules()}
    values = {id(b): b.detach().clone() for own in buffers.values() for b in own.values() if b is not None}
    model.eval()
    try:
        yield
    finally:
        for module, flag in flags.items():
            module.training = flag
        for module, own in buffers.items():
            _restore(module, own, values)


def _restore(module: nn.Module, own: dict[str, torch.Tensor | None], values: dict[int, torch.Tensor]) -> None:
    module._buffers.clear()
    module._buffers.update(own)
    with torch.no_grad():
        for buffer in own.values():
            if buffer is not None and not buffer.is_meta:
                buffer.copy_(values[id(buffer)])
