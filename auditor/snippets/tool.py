"""What a tool can be told of a plan, and how its code is written: names from the model with repr, so that they stay strings."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from ..numerics.formats import FORMATS
from .offer import Chosen

WIDTH = 100


@dataclass(frozen=True)
class Tool:
    """strategies: those the tool can follow. otherwise: what to do with a plan of another one, in a sentence.

    impossible: why a plan cannot be expressed although its strategy fits, or None.
    """

    title: str
    strategies: tuple[str, ...]
    otherwise: str
    render: Callable[[Chosen], str]
    impossible: Callable[[Chosen], str | None] = lambda chosen: None


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
    return comment(f"{title}: the plan {chosen.plan.name!r}. {_evidence(chosen)}", chosen.remark)


def _evidence(chosen: Chosen) -> str:
    plan = chosen.plan
    if plan.measured_error is None:
        return "It failed when it was run, or was not run: audit the model again before you use it."
    held = "Verified" if plan.verified else "NOT within the budget"
    error = f"measured error {plan.measured_error:.2g} for a budget of {chosen.audit.max_error:.2g}"
    return f"{held}: {error}, on the patched model itself. This tool was not run."


def listing(name: str, items: Iterable[str]) -> str:
    """A list literal, one item a line; the items are Python already."""
    lines = "".join(f"    {item},\n" for item in items)
    return f"{name} = [\n{lines}]\n" if lines else f"{name} = []\n"


def mapping(name: str, items: Mapping[str, str]) -> str:
    """A dict literal from names to Python expressions."""
    return f"{name} = {{\n" + "".join(f"    {key!r}: {value},\n" for key, value in items.items()) + "}\n"
