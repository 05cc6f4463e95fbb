"""plan.json read back: nothing in it is trusted before it has been looked at."""

from __future__ import annotations

import json
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from ..errors import PlanError
from ..records import FORMAT_VERSION
from ..strategies import names

_AGAIN = "Audit the model again to write a new one."


def load_plan(path: str | PathLike[str]) -> dict[str, Any]:
    """The contents of a `plan.json`. Raises: PlanError(slug="missing-plan" | "bad-plan")."""
    file = Path(path)
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        reason = error.strerror or str(error)
        raise PlanError(
            f"{file} cannot be read ({reason}). Give the path of a plan.json.", slug="missing-plan"
        ) from error
    except (ValueError, RecursionError) as error:
        raise PlanError(f"{file} is not a plan: {error}. {_AGAIN}", slug="bad-plan") from error
    return checked(document, str(file))


def checked(document: Any, where: str) -> dict[str, Any]:
    """The document, if every part that a plan is applied from has the form that write.py gives it."""
    version = document.get("format_version") if isinstance(document, Mapping) else None
    if version != FORMAT_VERSION:
        raise PlanError(
            f"{where} has format_version {version!r}, this auditor reads {FORMAT_VERSION}. {_AGAIN}", "bad-plan"
        )
    problem = _problem(document)
    if problem:
        raise PlanError(f"{where} is not a plan: {problem} cannot be read. {_AGAIN}", slug="bad-plan")
    return dict(document)


def _problem(document: Mapping[str, Any]) -> str | None:
    subject, plans, recommended = document.get("subject", {}), document.get("plans"), document.get("recommended")
    if not isinstance(subject, Mapping) or not isinstance(subject.get("parameters", 0), int):
        return "its subject"
    if not isinstance(recommended, str | None):
        return "what it recommends"
    if not isinstance(plans, Mapping) or not plans:
        return "its list of plans"
    return next((found for name, plan in plans.items() if (found := plan_problem(name, plan))), None)


def plan_problem(name: str, plan: Any) -> str | None:
    """Which part of one plan cannot be read, or None."""
    if not isinstance(plan, Mapping) or plan.get("strategy") not in names():
        return f"the strategy of {name!r}"
    if plan.get("format") not in ("fp16", "bf16"):
        return f"the format of {name!r}"
    scopes = plan.get("scopes")
    if not isinstance(scopes, Mapping):
        return f"the scopes of {name!r}"
    return next((f"the scope {path!r} of {name!r}" for path, choice in scopes.items() if not _is_choice(choice)), None)


def _is_choice(choice: Any) -> bool:
    return (
        isinstance(choice, Mapping)
        and choice.get("precision") in ("fp32", "fp16", "bf16")
        and choice.get("output", "cast") in ("keep", "cast")
        and isinstance(choice.get("because", []), list)
    )
