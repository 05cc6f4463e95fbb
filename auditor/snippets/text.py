"""Comments and tables of a snippet; every name from the model is written with repr, so that it stays a string."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping

from ..numerics.formats import FORMATS
from .offer import Chosen

WIDTH = 100


def dtype_text(fmt: str) -> str:
    """How code names the dtype of a format: `torch.float16`."""
    return f"torch.{FORMATS[fmt].storage}"


def comment(*paragraphs: str) -> str:
    """Paragraphs as comment lines. No line break of a paragraph survives to end the comment early."""
    wrapper = textwrap.TextWrapper(
        WIDTH, initial_indent="# ", subsequent_indent="# ", break_long_words=False, break_on_hyphens=False
    )
    printable = ("".join(c if c.isprintable() else " " for c in paragraph) for paragraph in paragraphs if paragraph)
    lines = [line for paragraph in printable for line in wrapper.wrap(paragraph)]
    return "\n".join(lines) + "\n"


def heading(title: str, chosen: Chosen) -> str:
    """What the snippet is, and how far its plan has been shown to hold."""
    return comment(f"{title}: the plan {chosen.name!r}. {_evidence(chosen)}", chosen.remark)


def _evidence(chosen: Chosen) -> str:
    if chosen.measured_error is None:
        return "It failed when it was run, or was not run: audit the model again before you use it."
    error = f"measured error {chosen.measured_error:.2g}"
    budget = "" if chosen.max_error is None else f" for a budget of {chosen.max_error:.2g}"
    held = "Verified" if chosen.verified else "NOT within the budget"
    return f"{held}: {error}{budget}, on the patched model itself. This tool was not run."


def listing(name: str, items: Iterable[str]) -> str:
    """A list literal, one item a line; the items are Python already."""
    lines = "".join(f"    {item},\n" for item in items)
    return f"{name} = [\n{lines}]\n" if lines else f"{name} = []\n"


def mapping(name: str, items: Mapping[str, str]) -> str:
    """A dict literal from names to Python expressions."""
    return f"{name} = {{\n" + "".join(f"    {key!r}: {value},\n" for key, value in items.items()) + "}\n"
