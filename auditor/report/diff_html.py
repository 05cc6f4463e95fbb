"""A comparison of two audits as one HTML document that loads nothing."""

from __future__ import annotations

from ..document.compare import Comparison
from .diff_words import caveats, changes, error, exceptions, groups, headline, recommendation, speedup
from .templates import environment

SHOWN = 200
"""Rows of each table; what is beyond them is in the output of --format json."""


def render(found: Comparison) -> str:
    """Headline, caveats, plans, findings that are new or gone, and verdicts that changed."""
    return (
        environment()
        .get_template("diff.html.jinja")
        .render(
            found=found,
            headline=headline(found),
            recommendation=recommendation(found),
            caveats=caveats(found),
            new=groups(found.new),
            gone=groups(found.gone),
            changes=changes(found),
            error=error,
            speedup=speedup,
            exceptions=exceptions,
            shown=SHOWN,
        )
    )
