"""Rule texts as sentences, paragraphs and code: a rule indents its code by four spaces."""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass


@dataclass(frozen=True)
class Block:
    """A paragraph on one line, or code with its lines kept."""

    text: str
    code: bool


def sentence(text: str) -> str:
    """A message on one line, with a capital and a full stop, whatever its author left out."""
    line = " ".join(text.split())
    return f"{line[:1].upper()}{line[1:]}{'' if line.endswith(('.', '!', '?')) else '.'}" if line else ""


def blocks(text: str) -> tuple[Block, ...]:
    """Paragraphs and code in order; blank lines inside a stretch of code belong to it."""
    found: list[Block] = []
    for part in re.split(r"\n[ \t]*\n", text.strip("\n")):
        code = all(line.startswith("    ") for line in part.splitlines() if line.strip()) and part.strip() != ""
        if code and found and found[-1].code:
            found[-1] = Block(f"{found[-1].text}\n\n{textwrap.dedent(part)}", code=True)
        elif part.strip():
            found.append(Block(textwrap.dedent(part).rstrip() if code else " ".join(part.split()), code))
    return tuple(found)


def summary(text: str) -> str:
    """The paragraphs of a text in one line, its code left out."""
    return " ".join(block.text.rstrip(":") + "." * block.text.endswith(":") for block in blocks(text) if not block.code)


def remedy(text: str) -> str:
    """The first sentence of an advice, on one line."""
    return re.split(r"(?<=[.!?:])\s+(?=[A-Z])", summary(text), maxsplit=1)[0]
