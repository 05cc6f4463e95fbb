"""An audit leaves no trace in the process: generators, dtype, threads, gradient mode, environment come back as they were."""

from __future__ import annotations

import os
import random
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from ..devices import generators
from .draws import reseed
from .ieee import ieee, matmul_precision, set_matmul_precision


@contextmanager
def untouched(seed: int) -> Iterator[None]:
    """Run the body from `seed`, FP32 in IEEE arithmetic; every generator and global setting of torch, NumPy and random is restored after it."""
    with ieee(), _generators():
        back = settings()
        reseed(seed)
        try:
            yield
        finally:
            back()


def settings() -> Callable[[], None]:
    """Call the answer to put back what a model may have set for the whole process: of torch, and what Python runs in."""
    before = [read() for read, _ in _SETTINGS]

    def back() -> None:
        for (read, put), value in zip(_SETTINGS, before, strict=True):
            if read() != value:
                put(value)

    return back


def _deterministic() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


def _set_deterministic(wanted: tuple[bool, bool]) -> None:
    torch.use_deterministic_algorithms(wanted[0], warn_only=wanted[1])


def _autocast() -> list[tuple[bool, torch.dtype]]:
    return [(torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in ("cpu", "cuda")]


def _set_autocast(wanted: list[tuple[bool, torch.dtype]]) -> None:
    for device, (enabled, dtype) in zip(("cpu", "cuda"), wanted, strict=True):
        torch.set_autocast_enabled(device, enabled)
        torch.set_autocast_dtype(device, dtype)


def _attention() -> list[bool]:
    """Which kernels attention may take."""
    cuda = torch.backends.cuda
    asked = (cuda.flash_sdp_enabled, cuda.mem_efficient_sdp_enabled, cuda.math_sdp_enabled, cuda.cudnn_sdp_enabled)
    return [bool(enabled()) for enabled in asked]  # type: ignore[no-untyped-call]


def _set_attention(wanted: list[bool]) -> None:
    cuda = torch.backends.cuda
    setters = (cuda.enable_flash_sdp, cuda.enable_mem_efficient_sdp, cuda.enable_math_sdp, cuda.enable_cudnn_sdp)
    for enable, value in zip(setters, wanted, strict=True):
        enable(value)


def _set_environment(wanted: dict[str, str]) -> None:
    """Only what differs: torch's compiler names its cache there once it is imported."""
    for name in os.environ.keys() - wanted.keys():
        del os.environ[name]
    os.environ.update({name: value for name, value in wanted.items() if os.environ.get(name) != value})


def _directory() -> str | None:
    try:
        return str(Path.cwd())
    except OSError:  # it was deleted
        return None


def _set_directory(wanted: str | None) -> None:
    if wanted is not None:
        with suppress(OSError):
            os.chdir(wanted)


def _set_path(wanted: list[str]) -> None:
    sys.path[:] = wanted


def _set_filters(wanted: list[Any]) -> None:
    """Only where they differ: a change has every warning said again that was said once."""
    warnings.filters[:] = wanted  # type: ignore[index]
    warnings._filters_mutated()  # type: ignore[attr-defined]


_SETTINGS: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_num_threads, torch.set_num_threads),
    (torch.is_grad_enabled, torch.set_grad_enabled),
    (matmul_precision, set_matmul_precision),
    (_deterministic, _set_deterministic),
    (_autocast, _set_autocast),
    (_attention, _set_attention),
    (lambda: dict(os.environ), _set_environment),
    (_directory, _set_directory),
    (lambda: list(sys.path), _set_path),
    (lambda: list(warnings.filters), _set_filters),
)


@contextmanager
def _generators() -> Iterator[None]:
    """Restores the state of every random generator, without starting CUDA where it has not been used."""
    numpy = sys.modules.get("numpy")
    of_python, of_torch = random.getstate(), torch.get_rng_state()
    of_numpy = numpy.random.get_state() if numpy else None
    of_gpus = generators()
    try:
        yield
    finally:
        random.setstate(of_python)
        torch.set_rng_state(of_torch)
        if numpy and of_numpy is not None:
            numpy.random.set_state(of_numpy)
        for back in of_gpus:
            back()


@contextmanager
def swapped(holder: Any, name: str, value: Any) -> Iterator[None]:
    """`holder.name` is `value` in the body. The holder has the attribute itself: a module, or the class that defines it."""
    kept = vars(holder)[name]
    setattr(holder, name, value)
    try:
        yield
    finally:
        setattr(holder, name, kept)
