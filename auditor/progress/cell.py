"""Progress in a notebook: one line below the cell that changes while the audit runs."""

from __future__ import annotations

import sys
import time
import uuid
from html import escape
from importlib import import_module
from typing import Any, Self

from ..report.words import printable
from .forecast import duration
from .shown import Live, said


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook."""
    known = sys.modules.get("IPython")
    shell = known.get_ipython() if known is not None and hasattr(known, "get_ipython") else None
    return shell is not None and type(shell).__name__ == "ZMQInteractiveShell"


class Cell(Live):
    """The line; it says at the end how long the audit took."""

    def __init__(self, training: bool = False) -> None:
        super().__init__(training)
        self._id = uuid.uuid4().hex
        self._open = False

    def __enter__(self) -> Self:
        self._clock.start()
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        self._clock.stop()
        spent = duration(self._forecast.elapsed(time.monotonic()))
        if self._open:
            self._show(
                f"audited in {spent}" if kind is None else f"ended in {self._forecast.stage} after {spent}", None
            )

    def _draw(self) -> None:
        if not self._forecast.stage:
            return
        now, (place, places) = time.monotonic(), self._forecast.place
        share = self._forecast.share(now)
        text = f"{self._forecast.stage} {place}/{places}, {said(self._forecast, now)}"
        self._show(f"{text}: {printable(self._forecast.detail)}" if self._forecast.detail else text, share)

    def _show(self, text: str, share: float | None) -> None:
        display: Any = import_module("IPython.display").display
        bar = "" if share is None else f'<progress max="1" value="{share:.3f}"></progress> '
        data: dict[str, Any] = {"text/plain": text, "text/html": f"{bar}<code>{escape(text)}</code>"}
        with self._lock:
            display(data, raw=True, display_id=self._id, update=self._open)
            self._open = True
