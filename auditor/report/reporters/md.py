"""A summary to paste into a pull request, a model card or a job summary."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from ...records.audit import Audit
from ..findings import Causes, causes
from ..kept import Island
from ..prose import sentence
from ..view import PlanView, View, view
from ..words import count, label, line, op, percent, printable, ratio

CAUSES_SHOWN = 10
ISLANDS_SHOWN = 12


def render(audit: Audit) -> str:
    """GitHub-flavoured Markdown; names from the model cannot break out of the table cells or add markup."""
    return "\n".join(_lines(audit)) + "\n"


def _lines(audit: Audit) -> Iterator[str]:
    seen = view(audit)
    yield f"## Precision audit of {code(audit.subject.name)}\n"
    yield f"**{escape(seen.headline)}**\n"
    yield f"{escape(' '.join((seen.proof, *seen.broken, *seen.contrast)))}\n"
    yield from _plans(seen)
    yield from _times(seen)
    yield from (f"Program {escape(p.program)}\n" for p in seen.plans if p.program)
    yield from _criteria(seen)
    yield from _score(seen)
    yield from (f"{escape(proposal)}\n" for proposal in seen.proposals)
    if seen.chosen and seen.chosen.islands:
        yield from _islands(seen.chosen.islands)
    if audit.training:
        yield f"Training: {escape(sentence(audit.training.recommendation))}\n"
    yield from _findings(causes(audit))
    yield from (f"> {escape(limit)}  " for limit in seen.limits)
    yield f"\nReproduce: {code(audit.command)}"


def code(text: str) -> str:
    """A code span that ends where it should, whatever the text holds."""
    text = printable(text) or " "
    fence = "`" * (max((len(run) for run in re.findall("`+", text)), default=0) + 1)
    space = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{fence}{space}{text}{space}{fence}"


def cell(text: str) -> str:
    """A code span inside a table, where a bar ends the cell even within code."""
    return code(text).replace("|", "\\|")


def escape(text: str) -> str:
    """Prose without markup of its own."""
    return re.sub(r"([\\`*_\[\]<>|#~])", r"\\\1", printable(text))


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _plans(seen: View) -> Iterator[str]:
    plans: tuple[PlanView, ...] = seen.plans
    if not plans:
        return
    yield _row(("Plan", "Without it", "Predicted error", "Measured error", "Low-precision FLOPs", "Predicted speed-up"))
    yield _row(("---", "---:", "---:", "---:", "---:", "---:"))
    for p in plans:
        plan = p.plan
        title = f"**{p.title}** (recommended)" if p.recommended else p.title
        predicted, measured, speed = p.figures
        if not p.idle and plan.measured_error is not None:
            measured = f"{ratio(plan.measured_error)}, {p.verdict}"
        share = percent(plan.low_precision_flops)
        yield _row((title, escape(p.before), predicted, measured, escape(share), speed))
    if seen.today:
        yield _row((escape(seen.today[0]), "", "", seen.today[1], "", ""))
    yield ""


def _times(seen: View) -> Iterator[str]:
    if seen.timing is None:
        return
    yield f"{escape(seen.timing.about)}\n"
    yield from (f"- {escape(row.line)}" for row in seen.timing.rows)
    yield ""


def _criteria(seen: View) -> Iterator[str]:
    if not seen.criteria:
        return
    yield f"{escape(seen.criteria)}\n"
    yield from (f"- {p.title}: {escape(line)}" for p in seen.plans for line in p.criteria)
    yield ""


def _score(seen: View) -> Iterator[str]:
    if not seen.score:
        return
    yield f"{escape(seen.score)}\n"
    yield from (f"- {p.title}: {escape(p.score)}" for p in seen.plans if p.score)
    yield ""


def _islands(islands: tuple[Island, ...]) -> Iterator[str]:
    yield "Kept apart by the recommended plan:\n"
    for island in islands[:ISLANDS_SHOWN]:
        name = code(island.name)
        why = f", because {escape(island.why)}" if island.why else ""
        which = f": {code(island.which)}" if island.which else ""
        yield f"- {name} in {label(island.precision)}{why}{which}"
    if len(islands) > ISLANDS_SHOWN:
        yield f"- and {len(islands) - ISLANDS_SHOWN} more, in plan.json"
    yield ""


def _findings(found: Causes) -> Iterator[str]:
    yield f"{escape(sentence(f'{found.headline}. {found.about}'.strip()))}\n"
    if not found.wanting:
        return
    yield _row(("Cause", "Where", "Operation", "Line", "What"))
    yield _row(("---",) * 5)
    for cause in found.wanting[:CAUSES_SHOWN]:
        worst = cause.worst
        at = line(worst.source, worst.called_from)
        rules = f"{', '.join(cause.codes)} {cause.severity}"
        yield _row(
            (
                escape(rules),
                cell(cause.where),
                cell(op(worst.op)),
                cell(at) if at else "",
                escape(sentence(worst.message)),
            )
        )
    if len(found.wanting) > CAUSES_SHOWN:
        yield f"\n{count(len(found.wanting) - CAUSES_SHOWN, 'more cause')} in the report."
    yield ""
