"""An audit in its files, as far as two of them are compared."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from .read import loaded, measured_beside, read_audit, read_measurements
from .steady import Contributions

LEVELS = ("info", "warning", "error")


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
    formats: tuple[str, ...] = ()
    agrees: bool | None = None


_KNOWN = tuple(field.name for field in fields(Known))


@dataclass(frozen=True)
class Judged:
    """An operation and its verdict in each format."""

    owner: str
    op: str
    source: str | None
    verdicts: Mapping[str, str]


@dataclass(frozen=True)
class Figures:
    """What one plan comes to; None where it was not measured, or is not finite. format: what its low scopes are in.

    exceptions: functions that stay FP32 in low scopes, each with its scope.
    """

    format: str
    predicted_error: float | None
    measured_error: float | None
    predicted_speedup: float | None
    verified: bool
    islands: int
    exceptions: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Record:
    """One audit as far as two of them are compared. settings: what has to be equal for numbers to be comparable.

    nodes: none where its measurements are not there.
    """

    label: str
    name: str
    recommended: str | None
    settings: Mapping[str, str]
    plans: Mapping[str, Figures]
    nodes: tuple[Judged, ...]
    findings: tuple[Known, ...]
    contributions: Contributions = field(default_factory=dict)


def read(path: Path) -> Record:
    """The audit in a plan.json, or in the directory that holds one, with the measurements.json beside it.

    Raises: PlanError(slug="missing-plan" | "bad-plan").
    """
    document = loaded(path)
    return record(document, str(path), measured_beside(path, document))


def record(document: Any, label: str, measured: Any = None) -> Record:
    """The parts of a plan.json document that are compared. measured: what its measurements.json holds.

    Raises: PlanError(slug="bad-plan").
    """
    found = read_audit(document, label)
    nodes = read_measurements(measured, label, document).nodes if measured is not None else None
    return Record(
        label=label,
        name=found.subject.name or "",
        recommended=found.recommended,
        settings=_settings(found.subject, found.environment, found.budget),
        plans={name: _figures(plan) for name, plan in found.plans.items()},
        nodes=tuple(_judged(node) for node in nodes or ()),
        contributions=found.contributions or {},
        findings=tuple(known for finding in found.findings for known in _known(finding)),
    )


def _known(kind: Any) -> Iterator[Known]:
    """One for each place."""
    first = Known(**{key: getattr(kind, key) for key in _KNOWN} | {"formats": tuple(kind.formats or ())})
    yield first
    yield from (replace(first, owner=owner) for owner in kind.also_in or ())


def _settings(subject: Any, environment: Any, budget: Any) -> dict[str, str]:
    return {
        "parameters": str(subject.parameters),
        "inputs": ", ".join(subject.inputs or ()),
        "source of the inputs": str(subject.inputs_source),
        "source of the weights": str(subject.weights_source),
        "budget": "; ".join([f"{budget.max_error} {budget.metric}", *(budget.criteria or ())]),
        "execution": f"{environment.device}, {environment.execution}",
        "torch": str(environment.torch),
        "auditor": str(environment.auditor),
    }


def _figures(plan: Any) -> Figures:
    root = plan.scopes[""].precision if "" in plan.scopes else None
    return Figures(
        format=plan.format,
        predicted_error=plan.predicted_error,
        measured_error=plan.measured_error,
        predicted_speedup=plan.predicted_speedup,
        verified=plan.verified,
        islands=sum(bool(path) and choice.precision != root for path, choice in plan.scopes.items()),
        exceptions=tuple((path, name) for path, choice in plan.scopes.items() for name in choice.keep),
    )


def _judged(node: Any) -> Judged:
    return Judged(node.owner, node.op, node.source, {name: found.verdict for name, found in node.formats().items()})
