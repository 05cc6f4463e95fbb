"""The summary for a terminal: plain text that never runs past its width."""

from __future__ import annotations

from rich.cells import cell_len

from ...records.audit import Audit
from ..findings import Causes, causes
from ..kept import Island
from ..page import Page, columns, looks
from ..prose import sentence
from ..view import PlanView, View, view
from ..words import count, label, line, memory, op, percent, printable

CAUSES_SHOWN = 8
ISLANDS_SHOWN = 6
PROPOSALS_SHOWN = 4
ADVICE_SHOWN = 4
MESSAGE_LINES = 2
WHY_LINES = 3
WHICH_LINES = 3


def render(audit: Audit, *, width: int | None = None, color: bool | None = None) -> str:
    """Verdict, plans and findings in lines of at most `width` cells; `color` adds ANSI codes, which take no cells.

    Both follow stdout unless they are given.
    """
    look = looks()
    width, color = look.width if width is None else width, look.color if color is None else color
    page = Page(max(width, 40), color)
    seen = view(audit)
    _title(page, audit)
    _verdict(page, seen)
    _plans(page, seen)
    _times(page, seen)
    _criteria(page, seen)
    _score(page, seen)
    _proposals(page, seen)
    _training(page, audit)
    _findings(page, causes(audit))
    _limits(page, seen)
    if audit.environment.held:
        page.labelled("Memory", sentence(audit.environment.held))
    return "\n".join(page.lines) + "\n"


def _title(page: Page, audit: Audit) -> None:
    env = audit.environment
    page.line(f"{audit.subject.name}  {count(len(audit.nodes), 'operation')}", "bold")
    page.line(f"auditor {env.auditor}  torch {env.torch}  {env.device} ({env.execution})", "muted")
    page.line()


def _verdict(page: Page, seen: View) -> None:
    page.labelled("Verdict", seen.headline, "good" if seen.chosen else "error")
    page.labelled("", seen.proof)
    for clause in (*seen.broken, *seen.contrast):
        page.labelled("", clause)
    page.line()


def _training(page: Page, audit: Audit) -> None:
    if audit.training is None:
        return
    page.labelled("Training", sentence(audit.training.recommendation))
    for title in list(dict.fromkeys(advice.title for advice in audit.training.advice))[:ADVICE_SHOWN]:
        page.labelled("", f"- {title}")
    page.line()


def _plans(page: Page, seen: View) -> None:
    if not seen.plans:
        return
    heads = ("", "Plan", "Without it", "Predicted", "Measured", "Speed-up")
    rows = [_plan_cells(p) for p in seen.plans]
    today = [("", seen.today[0], "", "", seen.today[1], "")] if seen.today else []
    widths = [max(cell_len(printable(row[i])) for row in (heads, *rows, *today)) for i in range(len(heads))]
    widths[1] = max(min(widths[1] + 2, page.width - sum(widths) + widths[1] - 2 * (len(widths) - 1)), 8)
    page.line(columns(list(zip(heads, widths, strict=True))), "muted")
    for p, row in zip(seen.plans, rows, strict=True):
        page.line(columns(list(zip(row, widths, strict=True))), "bold" if p.recommended else "")
    for row in today:
        page.line(columns(list(zip(row, widths, strict=True))))
    page.line()
    if seen.chosen:
        plan = seen.chosen.plan
        share, where = percent(plan.low_precision_flops), f" for one {plan.target}" if plan.target else ""
        page.line(f"  * recommended; {share} of the FLOPs low; speed-ups are predicted{where}")
        if plan.memory and plan.fp32_memory:
            page.line(f"    predicted memory: {memory(plan.memory)}; FP32: {memory(plan.fp32_memory)}")
        _islands(page, seen.chosen.islands)
        page.line()
    for p in seen.plans:
        if p.program:
            page.labelled("Program", p.program)


def _times(page: Page, seen: View) -> None:
    if seen.timing is None:
        return
    page.labelled("Times", seen.timing.about)
    for row in seen.timing.rows:
        page.labelled("", row.line)
    page.line()


def _criteria(page: Page, seen: View) -> None:
    """What the criteria came to under the recommended plan, under every plan where there is none."""
    if not seen.criteria:
        return
    page.labelled("Criteria", seen.criteria)
    for p in seen.plans:
        if p.recommended or seen.chosen is None:
            for line in p.criteria:
                page.labelled("", line if p.recommended else f"{p.title}: {line}")
    page.line()


def _score(page: Page, seen: View) -> None:
    if not seen.score:
        return
    page.labelled("Score", seen.score)
    for p in seen.plans:
        if p.score:
            page.labelled("", f"{p.title}: {p.score}")
    page.line()


def _proposals(page: Page, seen: View) -> None:
    for i, proposal in enumerate(seen.proposals[:PROPOSALS_SHOWN]):
        page.labelled("Outputs" if i == 0 else "", proposal)
    if len(seen.proposals) > PROPOSALS_SHOWN:
        page.labelled("", f"and {len(seen.proposals) - PROPOSALS_SHOWN} more, in plan.json")
    if seen.proposals:
        page.line()


def _plan_cells(p: PlanView) -> tuple[str, ...]:
    return "*" if p.recommended else "", p.title, p.before, *p.figures


def _islands(page: Page, islands: tuple[Island, ...]) -> None:
    for island in islands[:ISLANDS_SHOWN]:
        name = island.name
        why = island.why
        taken = max(30, min(cell_len(printable(name)), page.width - 42 - min(cell_len(printable(why)), 20) + 20))
        room = max(page.width - taken - 12, 8)
        fits = cell_len(printable(why)) <= room
        cells = [(name, taken), (why, room)] if fits else [(name, page.width - 10)]
        page.line("    " + columns([(label(island.precision), 4), *cells]))
        if not fits:
            page.paragraph(why, 8, WHY_LINES, "muted")
        if island.which:
            page.paragraph(island.which, 8, WHICH_LINES, "muted")
    if len(islands) > ISLANDS_SHOWN:
        page.line(f"    and {len(islands) - ISLANDS_SHOWN} more, in plan.json")


def _findings(page: Page, found: Causes) -> None:
    page.labelled("Findings", found.headline)
    if found.about:
        page.labelled("", found.about, "muted")
    for cause in found.wanting[:CAUSES_SHOWN]:
        worst = cause.worst
        room = max(page.width - 40, 12)
        source = worst.source or op(worst.op)
        cells = [(worst.rule, 7), (cause.severity, 7), (cause.where, room), (source, 18)]
        page.line("  " + columns(cells), cause.severity)
        if worst.called_from:
            page.line(f"    {printable(line(worst.source, worst.called_from))}", "muted")
        page.paragraph(sentence(worst.message), 4, MESSAGE_LINES, "muted")
        if cause.size:
            page.paragraph(cause.size, 4, 1, "muted")
    if len(found.wanting) > CAUSES_SHOWN:
        page.line(f"  and {count(len(found.wanting) - CAUSES_SHOWN, 'more cause')}, in the report")
    if found.all:
        page.line(f"  Explain: python -m auditor explain {found.all[0].worst.rule}", "muted")
    page.line()


def _limits(page: Page, seen: View) -> None:
    for i, limit in enumerate(seen.limits):
        page.labelled("Caution" if i == 0 else "", limit, "warning")
