"""The summary for a terminal, a log or a pipe."""

from __future__ import annotations

from ...records.audit import Audit
from ..blocks import Look, looks, to_terminal
from ..overview import screen


def render(audit: Audit, *, width: int | None = None, color: bool | None = None) -> str:
    """Verdict, what to do, plans and cautions in lines of at most `width` cells, but for heads of findings, which are one
    line each; `color` adds ANSI codes, which take no cells.

    Both follow stdout unless they are given.
    """
    look = looks()
    return to_terminal(screen(audit), Look(width or look.width, look.color if color is None else color))
