"""Snippets: a plan as code for other tools, each saying what its tool cannot express. Importing this needs no torch."""

from __future__ import annotations

from typing import Any

from ..errors import AuditorError
from ..records import Audit
from . import fsdp2, huggingface
from .offer import Tool, audit_in, choose, comment, heading, running
from .trainers import GRADSCALER, LIGHTNING

TOOLS: dict[str, Tool] = {
    "hf": huggingface.TOOL,
    "fsdp2": fsdp2.TOOL,
    "lightning": LIGHTNING,
    "gradscaler": GRADSCALER,
}


def snippet(plan: Any, tool: str, name: str | None = None) -> str:
    """Python to paste that makes `tool` follow a plan.

    plan: an Audit, a dict as in plan.json, or a path to one. tool: a key of TOOLS. name: which of its plans; if left
    out, the recommended one, or where the tool has no such strategy, the one of the same format that it has.
    Raises: AuditorError(slug="no-such-tool"), PlanError.
    """
    if not isinstance(tool, str) or tool not in TOOLS:
        raise AuditorError(f"no snippet is for {tool!r}: choose one of {', '.join(TOOLS)}", slug="no-such-tool")
    return _written(audit_in(plan), TOOLS[tool], name)


def snippets(plan: Any, name: str | None = None) -> dict[str, str]:
    """{tool: its snippet} for every tool. Raises: PlanError."""
    audit = audit_in(plan)
    return {key: _written(audit, tool, name) for key, tool in TOOLS.items()}


def _written(audit: Audit, tool: Tool, name: str | None) -> str:
    chosen = choose(audit, tool.strategies, name)
    if chosen is None:
        if audit.plans and not running(audit):
            return comment(f"{tool.title}: no plan can be run, as torch has no arithmetic in their formats.")
        wanted = " or ".join(tool.strategies)
        return comment(f"{tool.title}: no plan of strategy {wanted} holds the budget.", tool.otherwise)
    plan = chosen.plan
    if plan.strategy not in tool.strategies:
        said = f"{tool.title}: this cannot express {plan.name!r}, a plan of strategy {plan.strategy}."
        return comment(said, tool.otherwise)
    impossible = tool.impossible(chosen)
    if impossible:
        return comment(f"{tool.title}: this cannot express {plan.name!r}.", impossible)
    return heading(tool.title, chosen) + tool.render(chosen)
