"""The HTML report: one offline file, drawn on the server, with a little script for the layer table."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from ..numerics.formats import FORMATS
from ..resources import resource_dir
from ..result import Audit
from . import words
from .charts import FRAME, depth_chart, tradeoff
from .exponents import bars, exponent_map, narrowest
from .findings import ranked
from .origins import origins
from .prose import blocks, sentence
from .questions import questions
from .table import table
from .tools import tools
from .training import training_view
from .use import snippets
from .view import view

GROUPS_SHOWN = 24
MEMBERS_SHOWN = 40
OPEN = 5


def render(audit: Audit) -> str:
    """The whole report as one HTML document that loads nothing."""
    groups = ranked(audit)
    return (
        _environment()
        .get_template("report.html.jinja")
        .render(
            audit=audit,
            view=view(audit),
            groups=groups[:GROUPS_SHOWN],
            groups_left=groups[GROUPS_SHOWN:],
            members_shown=MEMBERS_SHOWN,
            open_findings=OPEN,
            origins=[origins(audit, fmt) for fmt in audit.formats],
            depth=depth_chart(audit),
            tradeoff=tradeoff(audit),
            exponents=exponent_map(audit),
            bars=lambda report: bars(report.range if report else None, audit.formats),
            narrow=narrowest(audit.formats),
            known=FORMATS,
            questions=questions(audit),
            table=table(audit),
            snippets=snippets(audit),
            tools=tools(audit),
            training=training_view(audit),
            frame=FRAME,
        )
    )


@cache
def _environment() -> Environment:
    folder = resource_dir("reports")
    environment = Environment(
        loader=FileSystemLoader(folder),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.policies["json.dumps_kwargs"] = {"sort_keys": True, "separators": (",", ":")}
    environment.globals.update(blocks=blocks, asset=lambda name: _asset(folder / name), words=words)
    environment.filters.update(sentence=sentence, prose=_prose, show=words.printable)
    return environment


def _asset(path: Path) -> Markup:
    """A style sheet or script of our own, inlined as it is; it may not close the element that holds it."""
    text = path.read_text(encoding="utf-8")
    if re.search(r"</(script|style)", text, re.IGNORECASE):
        raise ValueError(f"{path.name} holds a closing tag and cannot be inlined")
    return Markup(text)


def _prose(text: str) -> Markup:
    """Text with `backticks` set as code, everything else escaped."""
    line = words.printable(" ".join(text.split()))
    parts = line.split("`")
    if len(parts) % 2 == 0:
        return Markup.escape(line)
    return Markup("").join(
        Markup("<code>{}</code>").format(part) if i % 2 else Markup.escape(part) for i, part in enumerate(parts)
    )
