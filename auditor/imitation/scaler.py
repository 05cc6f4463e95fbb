"""`GradScaler("cuda")` where there is no CUDA: made in an imitated run, it scales instead of switching itself off."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_Scaler = torch.amp.grad_scaler.GradScaler
_ORIGINAL = _Scaler.__init__


@contextmanager
def scaled_as_on_cuda() -> Iterator[None]:
    """In the body, in this thread, a GradScaler for CUDA is one for the CPU's tensors."""
    thread = threading.get_ident()

    @functools.wraps(_ORIGINAL)
    def init(self: Any, device: str = "cuda", *args: Any, **kwargs: Any) -> None:
        here = threading.get_ident() == thread and not torch.cuda.is_available()
        _ORIGINAL(self, "cpu" if here and device == "cuda" else device, *args, **kwargs)

    _Scaler.__init__ = init  # type: ignore[method-assign]
    try:
        yield
    finally:
        _Scaler.__init__ = _ORIGINAL  # type: ignore[method-assign]
