"""The output formats of `--format`: functions from an Audit to text. Text and Markdown render the same blocks."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from .document.codec import to_document
from .features.page import Page, pages
from .records.audit import Audit
from .report import FORMATS, plans
from .report.annotations import github, place_of, sarif
from .report.blocks import Block, Code, Item, Prose, environment, to_markdown, to_terminal
from .report.charts import depth_chart
from .report.findings import Cause, Causes, causes
from .report.fixes import fix_words, offer
from .report.origins import decision_words, decisions_section, nonfinite_runs, origins
from .report.table import table
from .report.view import ReportView, method, next_step
from .report.words import count, label, line, printable, remedy, sentence, shorten

LINES = 40
"""Maximum number of lines that an audit prints on a terminal 100 characters wide."""
STAGES_SHOWN = 3
"""Number of stages, the longest, whose duration a terminal shows."""
AVOIDED = "Avoided"
"""Label of the section on problems that the plan avoids."""
SPARE = ("Formats", "In FP32", "Outputs", "Decisions", "Memory")
"""Labels of sections that the terminal output may omit, since the report contains them."""
NAMES = {"Formats": "verdicts by format", "In FP32": "what stays in FP32", "Outputs": "criteria that could be set"}
"""{label of a section: its contents, in words, where the label does not say it}."""
ENTRIES_SHOWN = 5
"""Number of causes that a page lists. HTML folds further causes and all notes; other pages count them."""
AVOIDED_SHOWN = 5
"""Maximum number of problems that are named although the plan avoids them and their repair gains nothing."""
ISLANDS_SHOWN, PROPOSALS_SHOWN, MEMBERS_SHOWN = 6, 4, 40
"""Maximum numbers of modules kept in FP32, of outputs, and of members of a cause that are listed."""


def overview(audit: Audit, entries: int = ENTRIES_SHOWN) -> list[Block]:
    """Blocks of the page: verdict, answers that the user asked for, at most `entries` causes to fix, plans, code that
    uses a plan; optional sections."""
    seen, env = ReportView(audit), audit.environment
    where = f"on {env.device}" if env.execution == "native" else "on a CPU that emulates a GPU"
    about = f"auditor {env.auditor}, torch {env.torch}, {where}"
    page: list[Block] = [
        Prose(f"Precision audit of {audit.subject.name}, {count(len(audit.nodes), 'operation')}", (about,), "title"),
        Prose("Verdict", (seen.headline,), "good" if seen.chosen else "error"),
        Prose("", tuple(filter(None, (seen.proof, *seen.broken)))),
        *(Prose(page.label, tuple(page.lines(audit))) for page in _with_lines(is_answer=True)),
        *_findings(audit, causes(audit), entries),
        Prose("Fix", (offer(audit),)),
        *plans.plan_table(audit, seen.plans),
    ]
    if use := plans.snippets(audit):
        page.append(Code("Use it", "\n".join(line for line in use[:2][-1].text.splitlines() if line)))
    return [block for block in (*page, *_more(audit, seen)) if block]


def summary(audit: Audit) -> str:
    """The audit's representation in Python: verdict, evidence, findings, and where to read more."""
    seen = ReportView(audit)
    first = f"Audit of {audit.subject.name}, {count(len(audit.nodes), 'operation')}"
    rest = "audit.save(directory) writes the report; audit.plans, audit.findings and audit.nodes have the details"
    lines = (first, seen.headline, seen.proof, *seen.broken, causes(audit).headline, rest)
    return "\n".join(printable(line) for line in lines if line)


def screen(audit: Audit, most: int = LINES) -> list[Block]:
    """Blocks of the page, in at most `most` lines if possible: omits optional sections, then causes, then items of
    lists."""
    for entries in range(ENTRIES_SHOWN, 0, -1):
        shown, left = overview(audit, entries), list[str]()
        while shown[-1].label in SPARE and _lines(shown) > most - 2:
            left.insert(0, NAMES.get(shown[-1].label, shown.pop().label.lower()))
        if left:
            shown.append(Prose("Omitted", (f"{', '.join(left)}: see report.html, or use --format md",), "muted"))
        if _lines(shown) <= most:
            break
    if _lines(shown) > most:  # repairs for formats that no plan uses matter less than any other line
        shown = [
            replace(block, texts=block.texts[:1]) if isinstance(block, Prose) and block.label == AVOIDED else block
            for block in shown
        ]
    answers = {page.label: page.always_shown(audit) for page in _with_lines(is_answer=True)}
    nouns = {"Caution": "limitation", **{page.label: page.noun for page in pages().values()}}
    lists = [block for block in shown if isinstance(block, Prose)]
    for block in sorted(lists, key=lambda block: (block.label in answers, -len(block.texts))):
        least = answers.get(block.label, 1)
        if (over := _lines(shown) - most) > 0 and len(block.texts) > max(least, 2):
            kept = block.texts[: max(len(block.texts) - over - 1, least)]
            noun = nouns.get(block.label, "result")
            more = f"{count(len(block.texts) - len(kept), f'more {noun}')}, in report.html"
            shown[shown.index(block)] = replace(block, texts=(*kept, more))
    return shown


def _lines(page: list[Block]) -> int:
    return to_terminal(page, 100, False).count("\n")


def _with_lines(is_answer: bool) -> list[Page]:
    """The features with lines on a terminal: either answers to what the user asked for, or the others."""
    return [page for page in pages().values() if page.label and page.is_answer == is_answer]


def _findings(audit: Audit, todo: Causes, most: int) -> Iterator[Block]:
    yield Prose("To do", (sentence(f"{todo.headline}. {todo.about}".strip()),))
    for cause in todo.to_do[:most]:
        worst = cause.worst
        called = f", {line(worst.source, worst.called_from)}" if worst.called_from else ""
        where = re.sub(r"^(.{75}).{20,}(.{75})$", r"\1...\2", cause.where)  # both ends of a long list or path
        note = f"{cause.severity.capitalize()} in {where}{called}. {remedy(worst.advice)} {cause.gain_words}".strip()
        head = f"{place_of(audit, cause)} {worst.rule} {sentence(worst.message)}"
        yield Item(head, (note,), cause.severity)
    more = [f"{count(left, 'more problem')} in the report"] if (left := len(todo.to_do) - most) > 0 else []
    if avoided := todo.avoided:
        heads = [f"{_place_words(audit, one)} {one.worst.rule}, {one.worst.name}" for one in avoided]
        problems = count(len(avoided), "problem")
        listed = "; ".join(shorten(heads, AVOIDED_SHOWN))
        sentence_on_avoided = f"The plan avoids {problems}; a repair would not make it faster: {listed}."
        yield Prose(AVOIDED, (sentence_on_avoided, *_repairs_of_other_formats(audit, avoided)), "muted")
    if todo.wanting or todo.notes:
        first = (todo.to_do or todo.all)[0].worst
        lead = "" if todo.wanting else "the first note, "
        command = f"to read about {lead}{first.rule}: python -m auditor explain {first.rule}"
        yield Prose("", ("; ".join([*more, command]),), "muted")


def _repairs_of_other_formats(audit: Audit, avoided: Sequence[Cause]) -> Iterator[str]:
    """For each format that the recommended plan does not use, and that turns values Inf or NaN: a sentence with the remedy
    of the cause, for users whose GPU or accuracy needs this format."""
    for fmt in audit.formats:
        if audit.plan is None or fmt == audit.plan.format:
            continue
        begins = {first.begins for first in nonfinite_runs(audit, fmt).values() if first is not None}
        for cause in avoided:
            if any(finding.node in begins and fmt in finding.formats for finding in cause.members):
                place = _place_words(audit, cause)
                advice = remedy(cause.worst.advice, label(fmt))
                yield f"To run in {label(fmt)} all the same, repair {place}. {advice}"
                break


def _place_words(audit: Audit, cause: Cause) -> str:
    """The line and operation of a cause, with the user's call that reached the line."""
    worst = cause.worst
    return line(worst.source, worst.called_from) if worst.called_from else str(place_of(audit, cause))


def _more(audit: Audit, seen: ReportView) -> list[Block]:
    """Sections that are shown unless empty: cautions, criteria, times, verdicts by format, and more."""
    shown = [p for p in seen.plans if p.recommended or seen.chosen is None]
    lines = [line if p.recommended else f"{p.title}: {line}" for p in shown for line in p.criteria]
    limits = [line for line in lines if line not in seen.proof]  # the verdict has said the others
    sections: dict[str, Iterable[str]] = {
        "Caution": seen.limits,
        **{page.label: page.lines(audit) for page in _with_lines(is_answer=False)},
        "Criteria": limits,
        "Score": [plans.score_headline(audit), *(f"{p.title}: {p.score}" for p in seen.plans if p.score)],
        "Times": plans.times(audit),
        "Formats": [tally.sentence for tally in seen.tallies],
        "In FP32": shorten(seen.chosen.islands, ISLANDS_SHOWN) if seen.chosen else (),
        "Default": [plans.proposal_words(offer) for offer in audit.proposals if offer.holds],
        "Outputs": shorten([plans.proposal_words(x) for x in audit.proposals if not x.holds], PROPOSALS_SHOWN),
        "Decisions": [decision_words(audit)],
        "Memory": [sentence(audit.environment.peak_memory or "")],
    }
    return [
        Prose(label, tuple(lines), "warning" if label == "Caution" else "", listed=label == "In FP32")
        for label, lines in sections.items()
    ]


def text(audit: Audit, *, width: int | None = None, color: bool | None = None, most: int = LINES) -> str:
    """The page for a terminal, in lines of at most `width` characters; only a cause's first line is never broken.
    color: whether to add ANSI codes. most: maximum number of lines, counted at a width of 100."""
    return to_terminal(screen(audit, most), width, color)


def below(audit: Audit, directory: Path, files: Sequence[Path], new: int | None) -> str:
    """The lines after the page on a terminal: the audit's files, and the next step. new: the number of findings that a
    baseline lacks; None without a baseline."""
    report = directory / "report.html"
    paths = (file.relative_to(directory) for file in files if file != report)
    names = ", ".join(dict.fromkeys("quantized/" if "quantized" in path.parts else str(path) for path in paths))
    known = "" if new is None else f"Baseline {len(audit.findings) - new} findings known, {new} new\n"
    step = to_terminal([Prose("Next", (next_step(audit, directory),))])
    return f"Report   {report}\nFiles    {directory}/: {names}\n{_duration(audit)}{known}{step}"


def _duration(audit: Audit) -> str:
    """A line with the seconds of the audit and of its longest stages; no file contains them."""
    seconds = audit.environment.seconds
    longest = sorted(seconds, key=lambda stage: -seconds[stage])[:STAGES_SHOWN]
    stages = ", ".join(f"{stage} {seconds[stage]:.1f} s" for stage in longest)
    return f"Time     {sum(seconds.values()):.1f} s, most of it: {stages}\n" if seconds else ""


def markdown(audit: Audit) -> str:
    """A summary to paste into a pull request, a model card or a CI job."""
    return to_markdown([*overview(audit), Prose("Reproduce", (audit.command,))])


def document(audit: Audit) -> str:
    """The contents of plan.json and measurements.json, in one JSON document."""
    return json.dumps(to_document(audit), indent=2) + "\n"


def html(audit: Audit) -> str:
    """The whole report as one HTML file without external resources; scripts in it show the table and the graph."""
    seen, template = ReportView(audit), environment().get_template("report.html.jinja")
    return template.render(
        audit=audit,
        view=seen,
        causes=causes(audit),
        place_of=place_of,
        fix_words=fix_words,
        members_shown=MEMBERS_SHOWN,
        entries_shown=ENTRIES_SHOWN,
        origins=origins(audit),
        depth=depth_chart(audit),
        plans=plans.plans_section(audit, seen.plans),
        table=table(audit),
        snippets=plans.snippets(audit),
        more_ways=plans.more_ways(audit),
        optional=_optional(audit),
        method=method(audit, seen.limits),
    )


def _optional(audit: Audit) -> dict[str, tuple[str, str, Sequence[str], bool, Sequence[Block]]]:
    """{id of a section: its name in the navigation, heading, sentence, whether it is folded, and its contents}, for
    sections that have any."""
    sections = {
        name: (page.name, page.title, page.headline(audit), page.is_folded, page.section(audit))
        for name, page in pages().items()
    }
    decided = ("Decisions", "Decisions inside the model", [decision_words(audit)], True, decisions_section(audit))
    return {name: section for name, section in {"decisions": decided, **sections}.items() if section[-1]}


REPORTERS: Mapping[str, Callable[[Audit], str]] = dict(
    zip(FORMATS, (github, html, document, markdown, sarif, text), strict=True)
)
WRITTEN: Mapping[str, Callable[[Audit], str]] = {"report.html": html, "findings.sarif": sarif}
"""{file name: reporter} for the files that are saved next to plan.json."""
