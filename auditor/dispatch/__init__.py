"""Every operation of a run of the user's model, handed to a handler before autograd, autocast and decomposition."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager

from . import fallback
from .handler import Busy, Handler, Traced, uncompiled, unfused
from .regions import Region, ambient, cast_weight, region_now

try:
    from . import intercept
except (ImportError, AttributeError):  # this torch lacks one of the private parts
    intercept = None  # type: ignore[assignment]

PUBLIC = "AUDITOR_PUBLIC_DISPATCH"
"""Environment variable: set to anything, only public parts of torch are used."""

__all__ = [
    "Busy",
    "Handler",
    "Region",
    "Traced",
    "ambient",
    "cast_weight",
    "intercepted",
    "region_now",
    "sees_whole",
    "uncompiled",
    "unfused",
]


def intercepted(handler: Handler, depth_of: Callable[[], int] = lambda: 0) -> AbstractContextManager[None]:
    """In the body every operation of this thread goes through `handler`; see intercept.py, and fallback.py."""
    if sees_whole():
        return intercept.intercepted(handler, depth_of)
    return fallback.intercepted(handler, depth_of)


def sees_whole() -> bool:
    """Whether operations are seen as their author called them, before autograd."""
    return intercept is not None and not os.environ.get(PUBLIC)
