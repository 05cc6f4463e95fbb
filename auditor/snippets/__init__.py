"""Plans as code for other tools, with a comment on what the tool cannot express. Importing this needs no torch."""

from __future__ import annotations

from typing import Any

from ..document.read import audit_in
from ..errors import AuditorError
from .offer import code_for
from .storage import FSDP2, HUGGING_FACE
from .trainers import GRADSCALER, LIGHTNING

TOOLS = {"hf": HUGGING_FACE, "fsdp2": FSDP2, "lightning": LIGHTNING, "gradscaler": GRADSCALER}


def snippet(plan: Any, tool: str, name: str | None = None) -> str:
    """Python code to paste, which makes a model in `tool` follow a plan.

    plan: an Audit, a dict as in plan.json, or a path to one. tool: a key of TOOLS. name: the plan's name; by default
    the recommended plan's or, if the tool does not support its strategy, another plan's, preferably in its format.
    Raises: AuditorError(slug="no-such-tool"), PlanError.
    """
    if not isinstance(tool, str) or tool not in TOOLS:
        raise AuditorError(f"there is no snippet for {tool!r}: choose one of {', '.join(TOOLS)}", slug="no-such-tool")
    return code_for(audit_in(plan), TOOLS[tool], name)


def snippets(plan: Any, name: str | None = None) -> dict[str, str]:
    """{tool: its snippet} for every tool. Raises: PlanError."""
    audit = audit_in(plan)
    return {key: code_for(audit, tool, name) for key, tool in TOOLS.items()}
