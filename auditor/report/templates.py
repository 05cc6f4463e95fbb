"""The Jinja environment of the HTML pages: everything is escaped, and what they need is inlined."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from ..resources import resource_dir
from . import blocks, words


@cache
def environment() -> Environment:
    """Autoescape on, undefined names refused, files inlined; made once."""
    folder = resource_dir("reports")
    made = Environment(
        loader=FileSystemLoader(folder),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    made.policies["json.dumps_kwargs"] = {"sort_keys": True, "separators": (",", ":")}
    made.globals.update(asset=lambda name: asset(folder / name), words=words, rule_text=blocks.rule_text)
    made.filters.update(sentence=words.sentence, prose=blocks.prose, show=words.printable, html=blocks.html)
    return made


def asset(path: Path) -> Markup:
    """A style sheet or script of our own, inlined as it is; it may not close the element that holds it."""
    text = path.read_text(encoding="utf-8")
    if re.search(r"</(script|style)", text, re.IGNORECASE):
        raise ValueError(f"{path.name} holds a closing tag and cannot be inlined")
    return Markup(text)
