"""What is made in other threads goes past the mode that puts it into files."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from .limit import now

SINGLE = "HF_DEACTIVATE_ASYNC_LOAD"
"""What tells transformers to read weights in the thread that asks for them."""


@contextmanager
def in_this_thread() -> Iterator[None]:
    """Where memory is limited, weights that the body reads are made in its own thread: those raised to FP32 lie in files too."""
    if now() is None:
        yield
        return
    before = os.environ.get(SINGLE)
    os.environ[SINGLE] = "1"
    try:
        yield
    finally:
        os.environ.pop(SINGLE)
        os.environ |= {} if before is None else {SINGLE: before}
