"""An audit leaves no trace in the process: generators, dtype, threads, gradient mode, environment come back as they were."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from .draws import reseed


@contextmanager
def untouched(seed: int) -> Iterator[None]:
    """Run the body from `seed`; every generator and global setting of torch, NumPy and random is restored after it."""
    dtype, threads, grad = torch.get_default_dtype(), torch.get_num_threads(), torch.is_grad_enabled()
    precision, environment = torch.get_float32_matmul_precision(), dict(os.environ)
    with _generators():
        reseed(seed)
        try:
            yield
        finally:
            torch.set_default_dtype(dtype)
            torch.set_num_threads(threads)
            torch.set_grad_enabled(grad)
            torch.set_float32_matmul_precision(precision)
            _set_environment(environment)


def _set_environment(wanted: dict[str, str]) -> None:
    """Only what differs: torch's compiler names its cache there once it is imported."""
    for name in os.environ.keys() - wanted.keys():
        del os.environ[name]
    os.environ.update({name: value for name, value in wanted.items() if os.environ.get(name) != value})


@contextmanager
def _generators() -> Iterator[None]:
    """Restores the state of every random generator, without starting CUDA where it has not been used."""
    numpy = sys.modules.get("numpy")
    of_python, of_torch = random.getstate(), torch.get_rng_state()
    of_numpy = numpy.random.get_state() if numpy else None
    of_cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        random.setstate(of_python)
        torch.set_rng_state(of_torch)
        if numpy and of_numpy is not None:
            numpy.random.set_state(of_numpy)
        if of_cuda is not None:
            torch.cuda.set_rng_state_all(of_cuda)


@contextmanager
def swapped(holder: Any, name: str, value: Any) -> Iterator[None]:
    """`holder.name` is `value` in the body. The holder has the attribute itself: a module, or the class that defines it."""
    kept = vars(holder)[name]
    setattr(holder, name, value)
    try:
        yield
    finally:
        setattr(holder, name, kept)
