"""What reports show of a feature."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..records.audit import Audit
from ..report.blocks import Block
from . import parts


def _no_lines(audit: Audit) -> Sequence[str]:
    return ()


def _first_line(audit: Audit) -> int:
    return 1


@dataclass(frozen=True)
class Page:
    """What reports show of a feature.

    name: the section in the navigation of the HTML report; title: its heading; headline: a sentence beside the heading;
    section: its contents, empty if the audit did not ask for the feature; is_folded: whether a click unfolds it. label:
    the label of `lines` on a terminal and in Markdown, empty without; is_answer: whether the lines stand below the
    verdict, or otherwise below the plans and their code; always_shown: the number of first lines of an answer that a
    terminal never omits; noun: what each further line is, for their count.
    """

    name: str
    title: str
    headline: Callable[[Audit], Sequence[str]]
    section: Callable[[Audit], Sequence[Block]]
    is_folded: bool = True
    label: str = ""
    lines: Callable[[Audit], Sequence[str]] = _no_lines
    is_answer: bool = True
    always_shown: Callable[[Audit], int] = _first_line
    noun: str = "result"


def pages() -> dict[str, Page]:
    """{feature: what reports show of it}."""
    return {name: report.PAGE for name, report in parts("report")}
