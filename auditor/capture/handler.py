"""What runs a model's operations in place of torch, and what holds while it does."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from .regions import Region


class Handler(Protocol):
    """What runs the operations of a model in place of torch."""

    def whole(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], region: Region) -> Any:
        """One operation as the author called it; autocast is out of the way."""

    def entering(
        self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], region: Region
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments of an operation on CUDA's autocast lists, once functorch's transforms are done with it; `part` comes next."""

    def part(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], region: Region) -> Any:
        """One of the operations that a transformed one comes down to, on plain tensors."""


class Busy(RuntimeError):
    """Another run is being intercepted: torch keeps one such mode for the process."""


class Traced(RuntimeError):
    """A tracer such as torch.export ran in the body: on its way out it takes the mode off that sees operations."""


_LOCK = threading.Lock()


@contextmanager
def alone() -> Iterator[None]:
    """The body is the only one of its kind in the process. Raises: Busy."""
    if not _LOCK.acquire(blocking=False):
        raise Busy("another run is being recorded or imitated, and torch allows one at a time in a process")
    try:
        yield
    finally:
        _LOCK.release()
