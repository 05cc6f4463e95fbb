"""The document that plan.json holds, for another program to read from stdout."""

from __future__ import annotations

import json

from ...records.audit import Audit


def render(audit: Audit) -> str:
    """JSON, indented by two."""
    return json.dumps(audit.to_json(), indent=2) + "\n"
