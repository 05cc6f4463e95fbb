"""A summary to paste into a pull request, a model card or a job summary."""

from __future__ import annotations

from ...records.audit import Audit
from ..blocks import Lines, to_markdown
from ..overview import overview


def render(audit: Audit) -> str:
    """GitHub-flavoured Markdown; names from the model cannot break out of the table cells or add markup."""
    return to_markdown([*overview(audit), Lines("Reproduce", (audit.command,))])
