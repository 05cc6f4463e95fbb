"""The reporters: what `--format` may ask for, each a function of an Audit that returns text."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping

from ..document.codec import to_document
from ..records.audit import Audit
from . import FORMATS
from .blocks import Lines, Look, environment, looks, to_markdown, to_terminal
from .charts import depth_chart
from .findings import Cause, causes
from .origins import origins
from .overview import ENTRIES_SHOWN, LINES, overview, screen
from .paths import Place, places
from .plans import plan_folds, plan_table
from .sarif import sarif
from .table import table
from .training import training_section
from .use import more_ways, snippets
from .view import method, view
from .words import count, op, printable, sentence, summary

MEMBERS_SHOWN = 40
CAUSES_SHOWN = 8
"""Causes to fix that stand in the page itself; those behind them, and notes, stand in a fold below."""
COMMANDS = {"error": "error", "warning": "warning", "info": "notice"}
MOST_PER_LEVEL = 10


def text(audit: Audit, *, width: int | None = None, color: bool | None = None, most: int = LINES) -> str:
    """Verdict, what to do, plans and cautions in lines of at most `width` cells, but for heads of findings, which are one
    line each; `color` adds ANSI codes, which take no cells. most: lines, where they are 100 cells wide.

    Width and colour follow stdout unless they are given.
    """
    look = looks()
    return to_terminal(screen(audit, most), Look(width or look.width, look.color if color is None else color))


def markdown(audit: Audit) -> str:
    """A summary to paste into a pull request, a model card or a job summary."""
    return to_markdown([*overview(audit), Lines("Reproduce", (audit.command,))])


def document(audit: Audit) -> str:
    """What plan.json and measurements.json hold, in one JSON document."""
    return json.dumps(to_document(audit), indent=2) + "\n"


def html(audit: Audit) -> str:
    """The whole report as one HTML document that loads nothing, with a little script for the layer table and the graph."""
    seen = view(audit)
    return (
        environment()
        .get_template("report.html.jinja")
        .render(
            audit=audit,
            view=seen,
            causes=causes(audit),
            causes_shown=CAUSES_SHOWN,
            members_shown=MEMBERS_SHOWN,
            entries_shown=ENTRIES_SHOWN,
            origins=origins(audit),
            times=[Lines("Times", seen.times, listed=True)],
            depth=depth_chart(audit),
            plan_table=[*plan_table(audit, seen.plans)],
            plan_folds=[*plan_folds(audit, seen.plans)],
            table=table(audit),
            snippets=snippets(audit),
            more_ways=more_ways(audit),
            training=training_section(audit),
            method=method(audit, seen.limits, seen.proposals),
        )
    )


def github(audit: Audit) -> str:
    """Workflow commands: the verdict as plain text, then annotations on the user's own lines, at most ten of each level, a
    cause each, and a line for those left out."""
    return "\n".join(_commands(audit)) + "\n"


def _commands(audit: Audit) -> Iterator[str]:
    seen, found, where = view(audit), causes(audit).all, places(audit)
    for said in (seen.headline, *seen.broken):
        yield printable(said).replace("::", ": :")  # the runner takes no such line for a command
    levels = {level: [cause for cause in found if cause.severity == level] for level in COMMANDS}
    shown = [cause for same in levels.values() for cause in same[:MOST_PER_LEVEL]]
    yield from (_annotation(cause, where[cause.worst.node]) for cause in shown)
    if left := len(found) - len(shown):
        yield f"{count(left, 'more cause')} in the report."


def _annotation(cause: Cause, place: Place) -> str:
    worst = cause.worst
    title = _property(f"{worst.rule} {worst.name}")
    said = f"{sentence(worst.message)} In {cause.where}, {op(worst.op)}."
    words = _data(" ".join(filter(None, (said, sentence(cause.size), cause.bearing, summary(worst.advice)))))
    return f"::{COMMANDS[cause.severity]} file={_property(place.file)},line={place.line},title={title}::{words}"


def _data(text: str) -> str:
    return printable(text).replace("%", "%25")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")


REPORTERS: Mapping[str, Callable[[Audit], str]] = dict(
    zip(FORMATS, (github, html, document, markdown, sarif, text), strict=True)
)
WRITTEN: Mapping[str, Callable[[Audit], str]] = {"report.html": html, "findings.sarif": sarif}
"""Those that are written beside plan.json, by the names of their files."""
