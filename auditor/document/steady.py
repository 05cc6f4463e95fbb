"""What two audits have of the same operations: a finding is not new because a number crossed a threshold by a little."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from ..records import Audit

BAND = 2.0
"""How many times larger a contribution has to be than it was for what the measurement says of it to be new."""

Contributions = Mapping[str, Mapping[str, Mapping[str, float | None]]]
"""{format: {module: {operation: the largest contribution}}}; None where the outputs turn non-finite."""


class Measured(Protocol):
    """As much of a finding as tells which contributions it rests on."""

    @property
    def owner(self) -> str: ...
    @property
    def op(self) -> str: ...
    @property
    def formats(self) -> tuple[str, ...]: ...


def watched(audit: Audit) -> Contributions:
    """The contributions that are sensitive, or would be if they were `BAND` times what they are, to three digits."""
    from ..measure.rerun import SENSITIVE_SHARE

    least = SENSITIVE_SHARE * audit.max_error / BAND
    each = (
        (fmt, report.node.owner, report.node.op, moved.isolated)
        for report in audit.nodes
        for fmt, moved in report.contributions.items()
    )
    return largest((fmt, owner, op, value) for fmt, owner, op, value in each if not value < least)


def largest(each: Iterable[tuple[str, str, str, float | None]]) -> Contributions:
    """Contributions gathered from (format, module, operation, contribution)."""
    found: dict[str, dict[str, dict[str, float | None]]] = {}
    for fmt, owner, op, value in each:
        of = found.setdefault(fmt, {}).setdefault(owner, {})
        most = max(_size(value), _size(of.get(op, 0.0)))
        of[op] = float(f"{most:.3g}") if math.isfinite(most) else None
    return found


def unmoved(before: Contributions, after: Contributions) -> Callable[[Measured], bool]:
    """Whether the contributions that a finding rests on are at most `BAND` times what they were."""

    def holds(finding: Measured) -> bool:
        pairs = [(_at(before, fmt, finding), _at(after, fmt, finding)) for fmt in finding.formats]
        return any(now for _, now in pairs) and all(now <= BAND * was for was, now in pairs)

    return holds


def _at(found: Contributions, fmt: str, finding: Measured) -> float:
    return _size(found.get(fmt, {}).get(finding.owner, {}).get(finding.op, 0.0))


def _size(value: float | None) -> float:
    return math.inf if value is None or not math.isfinite(value) else value
