"""A plan as the plain data that the runtime reads."""

from __future__ import annotations

from typing import Any

from ..records import Plan, ScopeChoice


def plan_table(plan: Plan) -> dict[str, Any]:
    """What applying a Plan record takes, as plan.json and `patched_model.py` hold it."""
    scopes = {path: _scope(choice) for path, choice in plan.scopes.items()}
    stored = {"raised": plan.raised, "stored_low": dict(plan.stored_low)}
    return {"strategy": plan.strategy, "format": plan.format, **stored, "scopes": scopes}


def _scope(choice: ScopeChoice) -> dict[str, Any]:
    kept = {"keep": list(choice.keep)} if choice.keep else {}
    return {"precision": choice.precision, "because": list(choice.because), "output": choice.output, **kept}
