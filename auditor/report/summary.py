"""What an audit came to, in a few lines: what Python shows of it."""

from __future__ import annotations

from ..records.audit import Audit
from .findings import causes
from .view import view
from .words import count, printable


def summary(audit: Audit) -> str:
    """The model, the verdict and its proof, the findings, and how to see more."""
    seen = view(audit)
    lines = (
        f"Audit of {audit.subject.name}, {count(len(audit.nodes), 'operation')}",
        seen.headline,
        seen.proof,
        *seen.broken,
        causes(audit).headline,
        "audit.save(directory) writes the report; audit.plans, audit.findings and audit.nodes hold the rest",
    )
    return "\n".join(printable(line) for line in lines if line)
