"""A comparison of two audits for a terminal: plain text that never runs past its width."""

from __future__ import annotations

from ..document.compare import Comparison
from ..document.compared import Known
from .diff_words import caveats, changes, error, exceptions, groups, headline, recommendation, speedup
from .page import Look, Page, columns, shorten
from .prose import sentence
from .words import count, label, op, printable, scope

SHOWN = 12


def render(found: Comparison, look: Look) -> str:
    """Headline, plans, new and gone findings, and changed verdicts, in lines of at most `look.width` cells."""
    page = Page(max(look.width, 40), look.color)
    page.labelled("Before", f"{found.before.label} ({found.before.name})", "muted")
    page.labelled("After", f"{found.after.label} ({found.after.name})", "muted")
    page.line()
    page.labelled("Verdict", headline(found), "error" if found.new else "good")
    page.labelled("", recommendation(found))
    for i, caveat in enumerate(caveats(found)):
        page.labelled("Caution" if i == 0 else "", caveat, "warning")
    page.line()
    _plans(page, found)
    _findings(page, "New", found.new)
    _findings(page, "Gone", found.gone)
    _verdicts(page, found)
    return "\n".join(page.lines).rstrip() + "\n"


def _plans(page: Page, found: Comparison) -> None:
    if not found.plans:
        return
    widths = (1, max(page.width - 53, 8), 21, 18, 3)
    page.line(columns(list(zip(("", "Plan", "Measured error", "Speed-up", ""), widths, strict=True))), "muted")
    for name, before, after in found.plans:
        measured = (error(side) for side in (before, after))
        speeds = (speedup(side) for side in (before, after))
        mark = "*" if name == found.after.recommended else ""
        cells = (mark, name, " -> ".join(measured), " -> ".join(speeds), "" if before != after else "=")
        page.line(columns(list(zip(cells, widths, strict=True))), "bold" if mark else "")
        if kept := exceptions(before, after):
            page.paragraph(printable(kept), 4, 4, "muted")
    page.line()


def _findings(page: Page, title: str, findings: tuple[Known, ...]) -> None:
    if not findings:
        return
    page.labelled(title, count(len(findings), "finding"))
    folded = groups(findings)
    for group in folded[:SHOWN]:
        first = group.first
        times = f" x{group.times}" if group.times > 1 else ""
        room = max(page.width - 40, 12)
        where = shorten(printable(scope(group.pattern)), room - len(times)) + times
        cells = [(first.rule, 7), (first.severity, 7), (where, room), (first.source or op(first.op), 18)]
        page.line("  " + columns(cells), first.severity)
        page.paragraph(sentence(first.message), 4, 2, "muted")
    if len(folded) > SHOWN:
        page.line(f"  and {len(folded) - SHOWN} more kinds: --format json has them all")
    page.line()


def _verdicts(page: Page, found: Comparison) -> None:
    if not found.verdicts:
        return
    page.labelled("Changed", count(len(found.verdicts), "verdict"))
    folded = changes(found)
    for group in folded[:SHOWN]:
        first = group.first
        times = f" x{group.times}" if group.times > 1 else ""
        room = max(page.width - 52, 8)
        where = shorten(printable(scope(group.pattern)), room - len(times)) + times
        change = f"{first.before or 'absent'} -> {first.after or 'absent'}"
        page.line("  " + columns([(label(first.format), 4), (change, 23), (where, room), (op(first.node.op), 17)]))
    if len(folded) > SHOWN:
        page.line(f"  and {len(folded) - SHOWN} more kinds: --format json has them all")
