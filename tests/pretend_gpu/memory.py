"""Tensors of the pretend GPU: their memory is the CPU's, under another name for its device; want of it."""

import ctypes
import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch

NAME = "pretend"
COUNT = 2
_CPU, _PRETEND = 1, 12
"""DLPack's names of the two kinds of devices, kDLCPU and kDLExtDev."""

_pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
_pointer_of.restype, _pointer_of.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]


class _Block(bytearray):
    """Memory that says when it is given back."""


class Allocator:
    """Memory of each GPU, in bytes. cached: what was given back and is kept for later. limit: what one of them has. taken: allocations so far; failing: the one that fails."""

    def __init__(self) -> None:
        self.limit: int | None = None
        self.taken, self.failing = 0, cast("int | None", None)
        self.used, self.peak, self.cached = [0] * COUNT, [0] * COUNT, [0] * COUNT

    def take(self, size: int, index: int) -> _Block:
        """Memory for a tensor; one without entries takes none. Raises: torch.OutOfMemoryError."""
        if not size:
            return _Block(1)
        self.taken += 1
        if self.taken == self.failing or (self.limit is not None and self.used[index] + size > self.limit):
            raise torch.OutOfMemoryError(
                f"CUDA out of memory. Tried to allocate {size} bytes. GPU {index} has {self.limit} bytes"
            )
        self.used[index] += size
        self.cached[index] = max(0, self.cached[index] - size)
        self.peak[index] = max(self.peak[index], self.used[index])
        block = _Block(size)
        weakref.finalize(block, self._give_back, size, index)
        return block

    def _give_back(self, size: int, index: int) -> None:
        self.used[index] -= size
        self.cached[index] += size


ALLOCATOR = Allocator()


def on_cpu(x: torch.Tensor) -> torch.Tensor:
    """The same memory as a tensor of the CPU."""
    return _named(x, _CPU, 0)


def on_pretend(x: torch.Tensor, index: int) -> torch.Tensor:
    """A copy of a CPU tensor, with its strides, in memory of the GPU."""
    span = 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True)) if x.numel() else 0
    block = ALLOCATOR.take(span * x.element_size(), index)
    flat = torch.frombuffer(block, dtype=torch.uint8)[: span * x.element_size()].view(x.dtype)
    copied = flat.as_strided(x.shape, x.stride()).copy_(x)
    return _named(copied, _PRETEND, index)


def _named(x: torch.Tensor, kind: int, index: int) -> torch.Tensor:
    boolean, detached = x.dtype is torch.bool, x.detach()
    capsule = torch._C._to_dlpack(detached)
    device = ctypes.cast(_pointer_of(capsule, b"dltensor") + 8, ctypes.POINTER(ctypes.c_int32))
    device[0], device[1] = kind, index
    result: Any = torch._C._from_dlpack(capsule)
    assert result.dtype is torch.bool or not boolean
    return result


# Want of memory on the pretend GPU: a limit, or one allocation that finds none.


@contextmanager
def limited(size: float) -> Iterator[None]:
    """The first GPU has so many bytes beside those in use."""
    gc.collect()
    ALLOCATOR.limit = ALLOCATOR.used[0] + int(size)
    try:
        yield
    finally:
        ALLOCATOR.limit = None


@contextmanager
def failing(at: int) -> Iterator[None]:
    """The allocation of that number, counted from here, finds no memory; those before and after it do."""
    ALLOCATOR.failing = ALLOCATOR.taken + at
    try:
        yield
    finally:
        ALLOCATOR.failing = None


@contextmanager
def counted(found: list[int]) -> Iterator[None]:
    """Adds how many allocations the body makes, and the most bytes that it holds at a time."""
    gc.collect()
    before, taken = ALLOCATOR.used[0], ALLOCATOR.taken
    ALLOCATOR.peak = list(ALLOCATOR.used)
    yield
    found += [ALLOCATOR.taken - taken, ALLOCATOR.peak[0] - before]
