"""Whether a run left traces on what hangs on a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import nn

from .reachable import Reachable
from .storages import plain_torch


@contextmanager
def traces(model: nn.Module) -> Iterator[Callable[[], bool]]:
    """Call what it gives to know whether the body wrote to anything that `unchanged` would put back; in doubt, it did."""
    with plain_torch():
        reached = Reachable(model, ())

    def left() -> bool:
        with plain_torch():
            return reached.rebound() or reached.storages.written()

    with reached.storages.saved_before_written():
        yield left
