"""What plan.json and measurements.json hold, in one document, for another program to read from stdout."""

from __future__ import annotations

import json

from ...document.codec import to_document
from ...records.audit import Audit


def render(audit: Audit) -> str:
    """JSON, indented by two."""
    return json.dumps(to_document(audit), indent=2) + "\n"
