"""Two audits read back from their plan.json: which findings are new, which are gone, and what became of the plans."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import PlanError
from .patch.document import load_plan

LEVELS = ("info", "warning", "error")
_FINDING = ("rule", "name", "owner", "op", "severity", "message")
_FORMATS = ("fp16", "bf16")


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


@dataclass(frozen=True)
class VerdictChange:
    """One operation whose verdict in one format is another now; None where it was, or is, not there."""

    node: Judged
    format: str
    before: str | None
    after: str | None


@dataclass(frozen=True)
class Comparison:
    """What changed from one audit to the next. caveats: settings that differ, as (what, before, after)."""

    before: Record
    after: Record
    new: tuple[Known, ...]
    gone: tuple[Known, ...]
    plans: tuple[tuple[str, Figures | None, Figures | None], ...]
    verdicts: tuple[VerdictChange, ...]
    caveats: tuple[tuple[str, str, str], ...]

    @property
    def kept(self) -> int:
        """Findings that are in both audits, no more severe than they were."""
        return len(self.after.findings) - len(self.new)


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


def compare(before: Record, after: Record) -> Comparison:
    """Everything that differs, in the order of the second audit, then of the first."""
    return Comparison(
        before,
        after,
        new=fresh(before.findings, after.findings),
        gone=_left_over(after.findings, before.findings, _identity),
        plans=tuple((n, before.plans.get(n), after.plans.get(n)) for n in {**after.plans, **before.plans}),
        verdicts=_verdict_changes(before.nodes, after.nodes),
        caveats=tuple(
            (what, before.settings[what], value)
            for what, value in after.settings.items()
            if before.settings[what] != value
        ),
    )


def fresh(known: Iterable[Known], found: Sequence[Known]) -> tuple[Known, ...]:
    """The findings that `known` does not hold, or holds as less severe."""
    severities: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for finding in known:
        severities[_identity(finding)].append(LEVELS.index(finding.severity))
    new = []
    for finding in sorted(found, key=lambda f: -LEVELS.index(f.severity)):
        held = sorted(severities[_identity(finding)])
        if held and held[-1] >= LEVELS.index(finding.severity):
            severities[_identity(finding)].remove(held[-1])
        else:
            new.append(finding)
    order = {id(finding): i for i, finding in enumerate(found)}
    return tuple(sorted(new, key=lambda f: order[id(f)]))


def _identity(finding: Known) -> tuple[str, ...]:
    return finding.rule, finding.owner, finding.op


def _left_over(taken: Iterable[Known], of: Iterable[Known], key: Callable[[Known], Any]) -> tuple[Known, ...]:
    counts = Counter(map(key, taken))
    left = []
    for finding in of:
        counts[key(finding)] -= 1
        if counts[key(finding)] < 0:
            left.append(finding)
    return tuple(left)


def _verdict_changes(before: Sequence[Judged], after: Sequence[Judged]) -> tuple[VerdictChange, ...]:
    old, new = _numbered(before), _numbered(after)
    changes = []
    for key in {**new, **old}:
        was, now = old.get(key), new.get(key)
        node = now or was
        assert node is not None
        for fmt in _FORMATS:
            verdicts = tuple(side.verdicts.get(fmt) if side else None for side in (was, now))
            if verdicts[0] != verdicts[1]:
                changes.append(VerdictChange(node, fmt, *verdicts))
    return tuple(changes)


def _numbered(nodes: Sequence[Judged]) -> dict[tuple[str, str, int], Judged]:
    """Operations by module, kind and count within it: names of graph nodes shift when one is added before them."""
    seen: Counter[tuple[str, str]] = Counter()
    found = {}
    for node in nodes:
        kind = (node.owner, node.op)
        found[(*kind, seen[kind])] = node
        seen[kind] += 1
    return found


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
    verdicts = {fmt: str(node[fmt]["verdict"]) for fmt in _FORMATS if fmt in node}
    return Judged(str(node["owner"]), str(node["op"]), _line(node), verdicts)


def _known(finding: Mapping[str, Any]) -> Known:
    if finding["severity"] not in LEVELS:
        raise KeyError("severity")
    rule, name, owner, op, severity, message = (str(finding[key]) for key in _FINDING)
    return Known(rule, name, owner, op, severity, message, _line(finding))


def _line(item: Mapping[str, Any]) -> str | None:
    return str(item["source"]) if item.get("source") is not None else None
