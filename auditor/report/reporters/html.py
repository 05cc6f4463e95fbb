"""The HTML report: one offline file, drawn on the server, with a little script for the layer table and the graph."""

from __future__ import annotations

from ...records.audit import Audit
from ..charts import depth_chart
from ..findings import causes
from ..method import method
from ..origins import origins
from ..overview import ENTRIES_SHOWN
from ..plans import plan_folds, plan_table
from ..table import table
from ..templates import environment
from ..training import training_section
from ..use import more_ways, snippets
from ..view import view

FILE = "report.html"
MEMBERS_SHOWN = 40
CAUSES_SHOWN = 8
"""Causes to fix that stand in the page itself; those behind them, and notes, stand in a fold below."""


def render(audit: Audit) -> str:
    """The whole report as one HTML document that loads nothing."""
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
