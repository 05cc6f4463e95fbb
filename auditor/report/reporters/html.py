"""The HTML report: one offline file, drawn on the server, with a little script for the layer table."""

from __future__ import annotations

from ...numerics.formats import FORMATS
from ...records.audit import Audit
from ..charts import FRAME, depth_chart, tradeoff
from ..exponents import bars, exponent_map, narrowest
from ..findings import causes
from ..origins import origins
from ..overview import ENTRIES_SHOWN
from ..prose import remedy
from ..table import table
from ..templates import environment
from ..tools import tools
from ..training import training_view
from ..use import snippets
from ..view import view

FILE = "report.html"
MEMBERS_SHOWN = 40
CAUSES_SHOWN = 8
"""Causes to fix that stand in the page itself; those behind them, and notes, stand in a fold below."""


def render(audit: Audit) -> str:
    """The whole report as one HTML document that loads nothing."""
    return (
        environment()
        .get_template("report.html.jinja")
        .render(
            audit=audit,
            view=view(audit),
            causes=causes(audit),
            causes_shown=CAUSES_SHOWN,
            members_shown=MEMBERS_SHOWN,
            entries_shown=ENTRIES_SHOWN,
            remedy=remedy,
            origins=[origins(audit, fmt) for fmt in audit.formats],
            depth=depth_chart(audit),
            tradeoff=tradeoff(audit),
            exponents=exponent_map(audit),
            bars=lambda report: bars(report.range if report else None, audit.formats),
            narrow=narrowest(audit.formats),
            known=FORMATS,
            table=table(audit),
            snippets=snippets(audit),
            tools=tools(audit),
            training=training_view(audit),
            frame=FRAME,
        )
    )
