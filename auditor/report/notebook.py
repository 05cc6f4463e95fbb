"""What a notebook shows of an Audit: the verdict, the plans and the first findings, in a few kilobytes of plain HTML."""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

from ..records.audit import Audit
from .findings import Cause, causes
from .prose import sentence
from .view import PlanView, view
from .words import line, op, percent, printable, ratio

SHOWN = 8
CELL = Markup('<td style="text-align:left">{}</td>')
HEAD = Markup('<th scope="col" style="text-align:left">{}</th>')


def render(audit: Audit) -> str:
    """HTML without script, style sheet or request, that takes its colours from the notebook around it."""
    seen = view(audit)
    plans = [_plan(p) for p in seen.plans]
    found = causes(audit)
    findings = [_finding(cause) for cause in found.wanting[:SHOWN]]
    heads = ("Plan", "Without it", "Predicted error", "Verdict", "Measured error", "FLOPs low", "Predicted speed-up")
    parts = [
        Markup("<p><strong>{}</strong> {}</p>").format(seen.headline, seen.proof),
        _table(heads, plans),
        _table(("Severity", "Rules", "Modules", "Operation", "Line", "What"), findings),
        Markup("<p>{}</p>").format(sentence(f"{found.headline}. {found.about}".strip())),
        *(Markup("<p><em>{}</em></p>").format(printable(limit)) for limit in seen.limits),
        Markup("<p>Save the whole report: <code>audit.save(&quot;audits/model&quot;)</code></p>"),
    ]
    return str(Markup("<div>{}</div>\n").format(Markup("\n").join(parts)))


def _plan(p: PlanView) -> tuple[str, ...]:
    plan, mark = p.plan, " (recommended)" if p.recommended else ""
    numbers = (ratio(plan.measured_error), percent(plan.low_precision_flops), f"{plan.predicted_speedup:.2f}×")
    return (p.title + mark, p.before, ratio(plan.predicted_error), p.verdict, *numbers)


def _finding(cause: Cause) -> tuple[str, ...]:
    worst = cause.worst
    where = (cause.where, op(worst.op), line(worst.source, worst.called_from))
    return (cause.severity, ", ".join(cause.codes), *where, sentence(worst.message))


def _table(heads: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> Markup:
    if not rows:
        return Markup("")
    body = Markup("").join(
        Markup("<tr>{}</tr>").format(Markup("").join(CELL.format(printable(cell)) for cell in row)) for row in rows
    )
    return Markup("<table><thead><tr>{}</tr></thead><tbody>{}</tbody></table>").format(
        Markup("").join(HEAD.format(head) for head in heads), body
    )
