"""Runs the user's model from the same state and with the same random numbers every time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch import nn

from ..numerics.entries import over_tensors
from ..records import Batch
from ..stages import beat
from .isolated import isolate
from .outputs import NamedTensors, tensor_outputs
from .process import disable_compilers, disable_fused_path

T = TypeVar("T")
Around = Callable[[], AbstractContextManager[Any]]


def run_model(
    model: nn.Module,
    batch: Batch,
    *,
    seed: int = 0,
    around: Around = nullcontext,
    gradients: bool = False,
    fused: bool = False,
) -> NamedTensors:
    """Run the model on a batch, in the context manager `around()`; return its output tensors with their names.

    Model and batch are unchanged. gradients: enable gradients in the run. fused: allow PyTorch's fused transformer
    path, which is off by default, since its results differ where a mask hides an entry.
    """

    def run() -> NamedTensors:
        args, kwargs = copy_batch(batch)
        with nullcontext() if fused else disable_fused_path(), disable_compilers(), around():
            return tensor_outputs(model(*args, **kwargs)).each(lambda x: x.detach().clone())

    if not gradients:
        return from_the_start(model, batch, run, seed)
    asked: list[bool] = []
    try:
        with _nothing_saved(asked):
            result = from_the_start(model, batch, run, seed, gradients=True)
    except Exception as error:
        if not asked and "saved tensor" not in str(error):  # torch.func raises this message for hooks
            raise
    else:
        if not asked:
            return result
    return from_the_start(model, batch, run, seed, gradients=True)


@contextmanager
def _nothing_saved(asked: list[bool]) -> Iterator[None]:
    """In the `with` block, autograd saves no tensors for a backward pass, since the outputs are not differentiated.
    If tensors were saved, each emulated low-precision product would keep a copy of its weight. asked: receives True if
    the forward itself computes gradients."""

    def refuse(_: None) -> torch.Tensor:
        asked.append(True)
        raise RuntimeError("this run saves no tensors for a backward pass")

    with torch.autograd.graph.saved_tensors_hooks(lambda x: None, refuse):
        yield


def from_the_start(model: nn.Module, batch: Batch, run: Callable[[], T], seed: int, gradients: bool = False) -> T:
    """Run `run()` with random generators seeded by `seed`, then restore model and batch. Gradients are off unless
    `gradients` is set or the forward computes gradients."""
    beat()
    try:
        with isolate(model, batch, seed=seed), torch.set_grad_enabled(gradients):
            return run()
    except RuntimeError as error:
        if gradients or "does not require grad" not in str(error):
            raise
    with isolate(model, batch, seed=seed), torch.enable_grad():
        return run()


def copy_batch(batch: Batch) -> Batch:
    """A copy of the batch, whose tensors are copies detached from autograd."""
    return over_tensors(lambda x: x.detach().clone().requires_grad_(x.requires_grad), batch)


@contextmanager
def stored_in(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """In the `with` block, the model is stored in `dtype`, like after `model.half()`; then its parameters, gradients
    and buffers are restored."""
    with isolate(model):
        # `Module.to` would convert complex tensors to real ones.
        model._apply(lambda x: x.to(dtype) if x.is_floating_point() else x)  # type: ignore[no-untyped-call]
        yield


def lowered_batch(batch: Batch, dtype: torch.dtype) -> Batch:
    """A copy of the batch with floating-point tensors converted to `dtype`."""
    return over_tensors(lambda x: x.to(dtype) if x.is_floating_point() else x, batch)
