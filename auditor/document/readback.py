"""An audit read back from its plan.json, as far as two of them are compared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import PlanError
from .load import load_plan

LEVELS = ("info", "warning", "error")
FORMATS = ("fp16", "bf16")
_FINDING = ("rule", "name", "owner", "op", "severity", "message")


@dataclass(frozen=True)
class Known:
    """A finding as plan.json has it. Its identity is rule, owner and op: lines move, and numbers vary."""

    rule: str
    name: str
    owner: str
    op: str
    severity: str
    message: str
    source: str | None


@dataclass(frozen=True)
class Judged:
    """An operation and its verdict in each format."""

    owner: str
    op: str
    source: str | None
    verdicts: Mapping[str, str]


@dataclass(frozen=True)
class Figures:
    """What one plan comes to; None where it was not measured, or is not finite."""

    predicted_error: float | None
    measured_error: float | None
    predicted_speedup: float | None
    verified: bool
    islands: int


@dataclass(frozen=True)
class Record:
    """One audit as far as two of them are compared. settings: what has to be equal for numbers to be comparable."""

    label: str
    name: str
    recommended: str | None
    settings: Mapping[str, str]
    plans: Mapping[str, Figures]
    nodes: tuple[Judged, ...]
    findings: tuple[Known, ...]


def read(path: Path) -> Record:
    """The audit in a plan.json, or in the directory that holds one.

    Raises: PlanError(slug="missing-plan" | "bad-plan").
    """
    file = path / "plan.json" if path.is_dir() else path
    return record(load_plan(file), str(path))


def record(document: Mapping[str, Any], label: str) -> Record:
    """The parts of a plan.json document that are compared. Raises: PlanError(slug="bad-plan")."""
    try:
        return Record(
            label=label,
            name=str(document["subject"].get("name", "")),
            recommended=document.get("recommended"),
            settings=_settings(document),
            plans={name: _figures(plan) for name, plan in document["plans"].items()},
            nodes=tuple(_judged(node) for node in document["nodes"]),
            findings=tuple(_known(finding) for finding in document["findings"]),
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise PlanError(
            f"{label} lacks what two audits are compared by: {error!r}. Audit again.", "bad-plan"
        ) from error


def _settings(document: Mapping[str, Any]) -> dict[str, str]:
    subject, environment, budget = document["subject"], document["environment"], document["budget"]
    return {
        "parameters": str(subject.get("parameters")),
        "inputs": ", ".join(map(str, subject.get("inputs", ()))),
        "source of the inputs": str(subject.get("inputs_source")),
        "source of the weights": str(subject.get("weights_source")),
        "budget": f"{budget.get('max_error')} {budget.get('metric')}",
        "execution": f"{environment.get('device')}, {environment.get('execution')}",
        "torch": str(environment.get("torch")),
        "auditor": str(environment.get("auditor")),
    }


def _figures(plan: Mapping[str, Any]) -> Figures:
    scopes = plan["scopes"].items()
    root = plan["scopes"].get("", {}).get("precision")
    return Figures(
        predicted_error=_number(plan.get("predicted_error")),
        measured_error=_number(plan.get("measured_error")),
        predicted_speedup=_number(plan.get("predicted_speedup")),
        verified=plan.get("verified") is True,
        islands=sum(bool(path) and choice["precision"] != root for path, choice in scopes),
    )


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _judged(node: Mapping[str, Any]) -> Judged:
    verdicts = {fmt: str(node[fmt]["verdict"]) for fmt in FORMATS if fmt in node}
    return Judged(str(node["owner"]), str(node["op"]), _line(node), verdicts)


def _known(finding: Mapping[str, Any]) -> Known:
    if finding["severity"] not in LEVELS:
        raise KeyError("severity")
    rule, name, owner, op, severity, message = (str(finding[key]) for key in _FINDING)
    return Known(rule, name, owner, op, severity, message, _line(finding))


def _line(item: Mapping[str, Any]) -> str | None:
    return str(item["source"]) if item.get("source") is not None else None
