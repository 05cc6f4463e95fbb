"""A plan as the plain data that the runtime reads."""

from __future__ import annotations

from typing import Any

from ..records import Plan


def plan_table(plan: Plan) -> dict[str, Any]:
    """`strategy`, `format` and `scopes` of a Plan record, as plan.json and `patched_model.py` hold them."""
    scopes = {
        path: {"precision": choice.precision, "because": list(choice.because), "output": choice.output}
        for path, choice in plan.scopes.items()
    }
    return {"strategy": plan.strategy, "format": plan.format, "scopes": scopes}
