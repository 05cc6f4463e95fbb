"""The recommended plan as code for other tools."""

from __future__ import annotations

from ..records.audit import Audit
from ..snippets import TOOLS, snippets


def tools(audit: Audit) -> tuple[tuple[str, str], ...]:
    """(title of the tool, code), in the order of the verb `snippet`."""
    return tuple((TOOLS[key].title, code) for key, code in snippets(audit).items())
