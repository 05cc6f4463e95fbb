"""The summary for a terminal: plain text that never runs past its width."""

from __future__ import annotations

from collections.abc import Iterator

from rich.cells import cell_len, chop_cells, set_cell_size

from ..result import Audit
from .findings import FindingGroup, ranked
from .prose import sentence
from .view import Island, PlanView, View, view
from .words import count, op, percent, printable, ratio, scope

FINDINGS_SHOWN = 8
ISLANDS_SHOWN = 6
ADVICE_SHOWN = 4
MESSAGE_LINES = 2
COLORS = {"bold": "1", "muted": "2", "error": "31", "warning": "33", "info": "36", "good": "32"}


def render(audit: Audit, *, width: int = 80, color: bool = False) -> str:
    """Verdict, plans and findings in lines of at most `width` cells; `color` adds ANSI codes, which take no cells."""
    page = _Page(max(width, 40), color)
    seen = view(audit)
    _title(page, audit)
    _verdict(page, seen)
    _plans(page, seen)
    _training(page, audit)
    _findings(page, ranked(audit))
    _limits(page, seen)
    return "\n".join(page.lines) + "\n"


class _Page:
    """Lines that fit. Everything is made printable here, so that no name can drive the terminal."""

    def __init__(self, width: int, color: bool) -> None:
        self.width = width
        self.lines: list[str] = []
        self._color = color

    def line(self, text: str = "", style: str = "") -> None:
        self.lines.append(self._styled(shorten(printable(text), self.width).rstrip(), style))

    def labelled(self, label: str, text: str, style: str = "") -> None:
        """A label in a column of its own, the text wrapped beside it."""
        room = self.width - 10
        for i, part in enumerate(_wrapped(printable(text), room)):
            head = f"{label if i == 0 else '':<10}"
            self.lines.append(self._styled(head, "bold" if i == 0 else "") + self._styled(part, style))

    def paragraph(self, text: str, indent: int, most: int, style: str = "") -> None:
        """Wrapped text, indented, ending in an ellipsis where it takes more than `most` lines."""
        lines = list(_wrapped(printable(text), self.width - indent - 2))
        shown = lines[:most]
        if len(lines) > most:
            shown[-1] += " …"
        self.lines += [self._styled(" " * indent + line, style) for line in shown]

    def _styled(self, text: str, style: str) -> str:
        return f"\x1b[{COLORS[style]}m{text}\x1b[0m" if self._color and style and text.strip() else text


def shorten(text: str, width: int) -> str:
    """At most `width` cells, the middle left out: both ends of a module path say more than its middle."""
    if cell_len(text) <= width:
        return text
    keep = width - 1
    head = set_cell_size(text, keep // 2).rstrip()
    return head + "…" + _tail(text, width - 1 - cell_len(head))


def _tail(text: str, width: int) -> str:
    taken = ""
    for character in reversed(text):
        if cell_len(character + taken) > width:
            break
        taken = character + taken
    return taken


def _wrapped(text: str, width: int) -> Iterator[str]:
    line = ""
    for word in text.split():
        for piece in chop_cells(word, width) if cell_len(word) > width else [word]:
            if line and cell_len(line) + 1 + cell_len(piece) > width:
                yield line
                line = piece
            else:
                line = f"{line} {piece}".strip()
    yield line


def _columns(cells: list[tuple[str, int]]) -> str:
    """Cells of fixed widths, two spaces apart; what is too long loses its middle."""
    return "  ".join(set_cell_size(shorten(printable(text), width), width) for text, width in cells)


def _title(page: _Page, audit: Audit) -> None:
    env = audit.environment
    page.line(f"{audit.subject.name}  {count(len(audit.nodes), 'operation')}", "bold")
    page.line(f"auditor {env.auditor}  torch {env.torch}  {env.device} ({env.execution})", "muted")
    page.line()


def _verdict(page: _Page, seen: View) -> None:
    page.labelled("Verdict", seen.headline, "good" if seen.chosen else "error")
    page.labelled("", seen.proof)
    for clause in seen.contrast:
        page.labelled("", clause)
    page.line()


def _training(page: _Page, audit: Audit) -> None:
    if audit.training is None:
        return
    page.labelled("Training", sentence(audit.training.recommendation))
    for advice in audit.training.advice[:ADVICE_SHOWN]:
        page.labelled("", f"- {advice.title}")
    page.line()


def _plans(page: _Page, seen: View) -> None:
    if not seen.plans:
        return
    widths = (1, max(page.width - 50, 8), 11, 9, 11, 8)
    heads = ("", "Plan", "Without it", "Predicted", "Measured", "Speed-up")
    page.line(_columns(list(zip(heads, widths, strict=True))), "muted")
    for p in seen.plans:
        page.line(_columns(list(zip(_plan_cells(p), widths, strict=True))), "bold" if p.recommended else "")
    page.line()
    if seen.chosen:
        page.line(
            f"  * recommended; {percent(seen.chosen.plan.low_precision_flops)} of the FLOPs in low precision; speed-ups are predicted"
        )
        _islands(page, seen.chosen.islands)
        page.line()


def _plan_cells(p: PlanView) -> tuple[str, ...]:
    plan = p.plan
    measured = p.verdict if p.verdict in ("failed", "non-finite", "not run") else ratio(plan.measured_error)
    mark = "*" if p.recommended else ""
    return mark, p.title, p.before, ratio(plan.predicted_error), measured, f"{plan.predicted_speedup:.2f}x"


def _islands(page: _Page, islands: tuple[Island, ...]) -> None:
    for island in islands[:ISLANDS_SHOWN]:
        times = f" x{len(island.paths)}" if len(island.paths) > 1 else ""
        name = (island.pattern if times else island.paths[0]) + times
        why = ", ".join(island.because)
        page.line("    " + _columns([(f"{island.precision.upper()}", 4), (name, 30), (why, max(page.width - 42, 8))]))
    if len(islands) > ISLANDS_SHOWN:
        page.line(f"    and {len(islands) - ISLANDS_SHOWN} more, in plan.json")


def _findings(page: _Page, groups: tuple[FindingGroup, ...]) -> None:
    if not groups:
        page.labelled("Findings", "none: no rule fired")
        page.line()
        return
    page.labelled(
        "Findings", count(sum(len(g.members) for g in groups), "finding") + " in " + count(len(groups), "kind")
    )
    for group in groups[:FINDINGS_SHOWN]:
        worst = group.worst
        times = f" x{len(group.members)}" if len(group.members) > 1 else ""
        room = max(page.width - 40, 12)
        where = shorten(printable(scope(group.pattern)), room - len(times)) + times
        source = worst.source or op(worst.op)
        page.line("  " + _columns([(worst.rule, 7), (worst.severity, 7), (where, room), (source, 18)]), worst.severity)
        page.paragraph(sentence(worst.message), 4, MESSAGE_LINES, "muted")
    if len(groups) > FINDINGS_SHOWN:
        page.line(f"  and {len(groups) - FINDINGS_SHOWN} more kinds, in the report")
    page.line(f"  Explain: python -m auditor explain {groups[0].worst.rule}", "muted")
    page.line()


def _limits(page: _Page, seen: View) -> None:
    for i, limit in enumerate(seen.limits):
        page.labelled("Caution" if i == 0 else "", limit, "warning")
