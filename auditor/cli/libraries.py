"""Libraries imported without a search for garbage at every few hundred objects: a quarter of what the import takes."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from . import guard


@contextmanager
def imported() -> Iterator[None]:
    """What the body leaves behind is taken to stay, and not looked through again; as ever where other work goes on here."""
    if not guard.is_watched() or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
