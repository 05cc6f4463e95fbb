"""The output formats of `--format`: functions from an Audit to text. All but JSON and HTML render the same blocks."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from ..document.codec import to_document
from ..records.audit import Audit
from . import FORMATS
from .annotations import github, place_of, sarif
from .blocks import Block, Code, Entries, Fold, Item, Look, Prose, Title, environment, looks, to_markdown, to_terminal
from .charts import depth_chart
from .findings import Cause, Causes, causes
from .generation import generation_lines, generation_section
from .origins import decision_lines, decisions_section, origins
from .plans import island_lines, more_ways, plan_folds, plan_table, snippets
from .quantization import quantization_lines, quantization_section
from .table import table
from .training import training_section
from .view import ReportView, method, view
from .words import count, line, printable, remedy, sentence, shorten

LINES = 40
"""Maximum number of lines that a command prints on a terminal 100 cells wide."""
SPARE = ("Formats", "Kept", "Outputs", "Memory")
"""Labels of optional sections, which the report contains too."""
ENTRIES_SHOWN = 5
"""Number of causes that a page lists; further ones, and notes, are folded."""
ISLANDS_SHOWN = 6
PROPOSALS_SHOWN = 4
ADVICE_SHOWN = 4


def overview(audit: Audit, entries: int = ENTRIES_SHOWN) -> list[Block]:
    """The page: verdict, at most `entries` things to do, plans and code that uses a plan; then optional sections."""
    seen, env = view(audit), audit.environment
    about = f"auditor {env.auditor}, torch {env.torch}, {env.device} ({env.execution})"
    page: list[Block] = [
        Title(f"Precision audit of {audit.subject.name}, {count(len(audit.nodes), 'operation')}", about),
        Prose("Verdict", (seen.headline,), "good" if seen.chosen else "error"),
        *([Prose("", told)] if (told := tuple(filter(None, (seen.proof, *seen.broken)))) else []),
        _findings(audit, causes(audit), entries),
        *plan_table(audit, seen.plans),
    ]
    if use := snippets(audit):
        page.append(Code("Use it", "\n".join(line for line in use[:2][-1].text.splitlines() if line)))
    return [*page, *_more(audit, seen)]


def summary(audit: Audit) -> str:
    """The audit's representation in Python: verdict, evidence, findings, and where to read more."""
    seen = view(audit)
    first = f"Audit of {audit.subject.name}, {count(len(audit.nodes), 'operation')}"
    rest = "audit.save(directory) writes the report; audit.plans, audit.findings and audit.nodes have the details"
    lines = (first, seen.headline, seen.proof, *seen.broken, causes(audit).headline, rest)
    return "\n".join(printable(line) for line in lines if line)


def screen(audit: Audit, most: int = LINES) -> list[Block]:
    """The page within this many lines: optional sections if they fit, then fewer causes, then shorter lists."""
    for entries in range(ENTRIES_SHOWN, 0, -1):
        page = overview(audit, entries)
        shown = [block for block in page if block.label not in SPARE]
        spare = [block for block in page if block.label in SPARE]
        while spare and _lines([*shown, spare[0]]) <= most - 2:
            shown.append(spare.pop(0))
        if spare:
            left = f"{'sections' if spare[1:] else 'section'} {' and '.join(block.label for block in spare)}"
            shown.append(Prose("Left out", (f"the {left}: see report.html, or use --format md",), "muted"))
        if _lines(shown) <= most:
            break
    for block in sorted((block for block in shown if isinstance(block, Prose)), key=lambda block: -len(block.texts)):
        if (over := _lines(shown) - most) > 0 and len(block.texts) > 2:
            texts = shorten(block.texts, max(len(block.texts) - over - 1, 1), "report.html")
            shown[shown.index(block)] = replace(block, texts=texts)
    return shown


def _lines(page: list[Block]) -> int:
    return to_terminal(page, Look(100, False)).count("\n")


def _findings(audit: Audit, todo: Causes, most: int) -> Entries:
    entries = tuple(_entry(audit, cause) for cause in todo.wanting[:most])
    left = len(todo.wanting) - len(entries)
    explain = f"python -m auditor explain {todo.all[0].worst.rule}" if todo.all else ""
    more = "; ".join(filter(None, (f"{count(left, 'more cause')} in the report" if left > 0 else "", explain)))
    return Entries("To do", sentence(f"{todo.headline}. {todo.about}".strip()), entries, more)


def _entry(audit: Audit, cause: Cause) -> Item:
    worst = cause.worst
    called = f", {line(worst.source, worst.called_from)}" if worst.called_from else ""
    where = re.sub(r"^(.{75}).{20,}(.{75})$", r"\1...\2", cause.where)  # both ends of a long list or path
    note = f"{cause.severity.capitalize()} in {where}{called}. {remedy(worst.advice)}"
    head = f"{place_of(audit, cause)} {worst.rule} {sentence(worst.message)}"
    return Item(head, (note,), cause.severity)


def _more(audit: Audit, seen: ReportView) -> Iterator[Block]:
    """Optional sections: cautions, training, criteria, scores, times; verdicts by format, FP32 modules, and more."""
    if seen.limits:
        yield Prose("Caution", seen.limits, "warning")
    if audit.training is not None:
        titles = tuple(dict.fromkeys(advice.title for advice in audit.training.advice))[:ADVICE_SHOWN]
        yield Prose("Training", (sentence(audit.training.recommendation), *(f"- {title}" for title in titles)))
    yield from decision_lines(audit)
    yield from generation_lines(audit)
    yield from quantization_lines(audit)
    if seen.criteria:
        shown = [p for p in seen.plans if p.recommended or seen.chosen is None]
        lines = [line if p.recommended else f"{p.title}: {line}" for p in shown for line in p.criteria]
        yield Prose("Criteria", (seen.criteria, *lines))
    if seen.score:
        yield Prose("Score", (seen.score, *(f"{p.title}: {p.score}" for p in seen.plans if p.score)))
    if seen.times:
        yield Prose("Times", seen.times)
    if seen.contrast:
        yield Prose("Formats", seen.contrast)
    if seen.chosen and seen.chosen.islands:
        yield island_lines(seen.chosen.islands, ISLANDS_SHOWN)
    if seen.proposals:
        yield Prose("Outputs", shorten(seen.proposals, PROPOSALS_SHOWN))
    if audit.environment.held:
        yield Prose("Memory", (sentence(audit.environment.held),))


MEMBERS_SHOWN = 40


def text(audit: Audit, *, width: int | None = None, color: bool | None = None, most: int = LINES) -> str:
    """Verdict, what to do, plans and cautions in lines of at most `width` cells, except that a finding's first line is
    never broken; `color` adds ANSI codes, which take no cells. most: number of lines, at 100 cells.

    Width and color follow stdout by default.
    """
    look = looks()
    return to_terminal(screen(audit, most), Look(width or look.width, look.color if color is None else color))


def markdown(audit: Audit) -> str:
    """A summary to paste into a pull request, a model card or a CI job."""
    return to_markdown([*overview(audit), Prose("Reproduce", (audit.command,))])


def document(audit: Audit) -> str:
    """The contents of plan.json and measurements.json, in one JSON document."""
    return json.dumps(to_document(audit), indent=2) + "\n"


def html(audit: Audit) -> str:
    """The whole report as one HTML file without external resources; a short script runs its table and graph."""
    seen, template = view(audit), environment().get_template("report.html.jinja")
    return template.render(
        audit=audit,
        view=seen,
        causes=causes(audit),
        place_of=place_of,
        members_shown=MEMBERS_SHOWN,
        entries_shown=ENTRIES_SHOWN,
        origins=origins(audit),
        depth=depth_chart(audit),
        plans=plans_section(audit, seen),
        table=table(audit),
        snippets=snippets(audit),
        more_ways=more_ways(audit),
        decisions=decisions_section(audit),
        decisions_summary=_summary(decision_lines(audit)),
        generation=generation_section(audit),
        generation_summary=_summary(generation_lines(audit)),
        quantization=quantization_section(audit),
        quantization_summary=_summary(quantization_lines(audit)),
        training=training_section(audit),
        method=method(audit, seen.limits, seen.proposals),
    )


def _summary(lines: Sequence[Block]) -> str:
    """The first paragraph of a section's lines for a terminal, as its summary."""
    return next((block.texts[0].replace("`", "") for block in lines if isinstance(block, Prose)), "")


def plans_section(audit: Audit, seen: ReportView) -> list[Block]:
    """The section on plans: each plan compared with the whole model in low precision."""
    if not seen.plans:
        return [Prose("", ("No plan was made for this audit.",), "empty")]
    about = (
        'A plan keeps some modules in FP32 and runs the rest in low precision. "No plan" is '
        "the error in the same format with no module in FP32."
    )
    return [
        *(Prose("", (said,), "about") for said in (about, seen.criteria, seen.score) if said),
        *plan_table(audit, seen.plans),
        *([Prose("Times", seen.times, listed=True)] if seen.times else []),
        Fold("Each plan: what it keeps in FP32 and why", tuple(plan_folds(audit, seen.plans))),
    ]


REPORTERS: Mapping[str, Callable[[Audit], str]] = dict(
    zip(FORMATS, (github, html, document, markdown, sarif, text), strict=True)
)
WRITTEN: Mapping[str, Callable[[Audit], str]] = {"report.html": html, "findings.sarif": sarif}
"""Reporters whose output is saved in the directory of plan.json, by file name."""
