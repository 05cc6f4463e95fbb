"""FP32 arithmetic in FP32, whatever the caller's flags allow: TF32 on a GPU, bfloat16 in a CPU's matrix products."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

GENERAL = ("generic", "cuda", "mkldnn")
"""What has a precision for all of its operations; the first for all of the others."""


@contextmanager
def ieee() -> Iterator[None]:
    """In the body matrix products, convolutions and recurrent layers of FP32 tensors compute in FP32; flags come back.

    cuDNN does not try out convolutions in it either, since which one it takes would differ from run to run.
    """
    cudnn = torch.backends.cudnn
    matmul, convolutions = matmul_precision(), _read(lambda: cudnn.allow_tf32)
    kept, benchmark = _own(_parts()), cudnn.benchmark
    try:
        with open_to_changes():
            _set("highest" if matmul else None, False if convolutions is not None else None)
            for part, _ in kept:
                part.fp32_precision = "ieee"
            cudnn.benchmark = False
        yield
    finally:
        with open_to_changes():
            _set(matmul, convolutions)
            for part, precision in kept:
                part.fp32_precision = precision
            cudnn.benchmark = benchmark


def open_to_changes() -> AbstractContextManager[Any]:
    """Whoever has imported torch's own tests finds the flags frozen: only what puts them back may set them."""
    opened: Any = getattr(torch.backends, "__allow_nonbracketed_mutation", nullcontext)
    changes: AbstractContextManager[Any] = opened()
    return changes


def _parts() -> list[Any]:
    """What has a precision of its own; torch before 2.9 has the older flags alone."""
    backends = torch.backends
    parts: list[Any] = [backends.cuda.matmul]
    for library in (backends.cudnn, backends.mkldnn):
        parts += [getattr(library, name, None) for name in ("matmul", "conv", "rnn")]
    return [part for part in parts if hasattr(part, "fp32_precision")]


def _own(parts: list[Any]) -> list[tuple[Any, str]]:
    """What each of these is set to itself, `none` where it follows the settings for all, which are lifted to see it."""
    kept = []
    for name in GENERAL if parts else ():
        kept.append((name, general(name)))
        set_general(name, "none")
    found = [(part, part.fp32_precision) for part in parts]
    for name, precision in kept:
        set_general(name, precision)
    return found


def general(backend: str) -> str:
    """The precision of all operations of a backend that have none of their own; of `generic`, of all backends."""
    return str(torch._C._get_fp32_precision_getter(backend, "all"))


def set_general(backend: str, precision: str) -> None:
    """Sets that; `torch.backends.mkldnn.fp32_precision = ...` sets it for all backends in torch 2.13."""
    torch._C._set_fp32_precision_setter(backend, "all", precision)


def _read(flag: Callable[[], Any]) -> Any:
    """The flag; None where torch has none, or refuses to name it because somebody set the finer ones."""
    try:
        return flag()
    except (AttributeError, RuntimeError):
        return None


def _set(matmul: str | None, convolutions: bool | None) -> None:
    """The older flags, which the finer ones follow: these are set first."""
    if convolutions is not None:
        torch.backends.cudnn.allow_tf32 = convolutions
    set_matmul_precision(matmul)


def matmul_precision() -> str | None:
    """`torch.get_float32_matmul_precision()`, None where torch refuses to name it."""
    found: str | None = _read(torch.get_float32_matmul_precision)
    return found


def set_matmul_precision(precision: str | None) -> None:
    """Sets it, unless it is None."""
    if precision is not None:
        torch.set_float32_matmul_precision(precision)
