"""Progress in a notebook: one line below the cell that changes while the audit runs."""

from __future__ import annotations

import sys
import uuid
from html import escape
from importlib import import_module
from typing import Any, Self

from ..report.words import printable
from .shown import Live


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook."""
    known = sys.modules.get("IPython")
    shell = known.get_ipython() if known is not None and hasattr(known, "get_ipython") else None
    return shell is not None and type(shell).__name__ == "ZMQInteractiveShell"


class Cell(Live):
    """The line; it says at the end how long the audit took."""

    def __init__(self) -> None:
        super().__init__()
        self._id = uuid.uuid4().hex
        self._open = False

    def __enter__(self) -> Self:
        self._clock.start()
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        self._clock.stop()
        spent = self._place.elapsed
        if self._open:
            self._show(f"audited in {spent}" if kind is None else f"ended in {self._place.stage} after {spent}", None)

    def _draw(self) -> None:
        if not self._place.stage:
            return
        text, detail = f"{self._place.number()}, {self._place.said()}", printable(self._place.detail)
        self._show(f"{text}: {detail}" if detail else text, self._place.share)

    def _show(self, text: str, share: float | None) -> None:
        display: Any = import_module("IPython.display").display
        bar = "" if share is None else f'<progress max="1" value="{share:.3f}"></progress> '
        data: dict[str, Any] = {"text/plain": text, "text/html": f"{bar}<code>{escape(text)}</code>"}
        with self._lock:
            display(data, raw=True, display_id=self._id, update=self._open)
            self._open = True
