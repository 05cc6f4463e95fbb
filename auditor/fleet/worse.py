"""What is worse of an audit than it was in an earlier fleet."""

from __future__ import annotations

from ..document.compare import BAND, Comparison, compare
from ..records import Audit
from ..report.words import count, ratio

SLOWER = 0.97
"""Share of a predicted speed-up below which a plan counts as slower."""


def worse(before: Audit, after: Audit) -> list[str]:
    """What got worse, a line each; none where nothing did."""
    found = compare(before, after)
    lines = [*_recommendation(found), *_figures(found)]
    for severity in ("error", "warning"):
        new = [finding for finding in found.new if finding.severity == severity]
        lines += [f"{count(len(new), f'new {severity}')}: {', '.join(sorted({f.rule for f in new}))}"] if new else []
    unsafe = sum(change.after == "unsafe" and change.before is not None for change in found.verdicts)
    return lines + ([f"{count(unsafe, 'operation')} became unsafe"] if unsafe else [])


def _recommendation(found: Comparison) -> list[str]:
    was, now = found.before.recommended, found.after.recommended
    return [f"{was} was recommended, and no plan is"] if was and not now else []


def _figures(found: Comparison) -> list[str]:
    name = found.after.recommended
    before = found.before.plans.get(found.before.recommended or "")
    after = found.after.plans.get(name or "")
    if before is None or after is None:
        return []
    lines = []
    if before.measured_error and after.measured_error and after.measured_error > BAND * before.measured_error:
        lines.append(f"error {ratio(before.measured_error)} before, {ratio(after.measured_error)} now")
    speeds = before.predicted_speedup, after.predicted_speedup
    if speeds[0] and speeds[1] and speeds[1] < SLOWER * speeds[0]:
        lines.append(f"speed-up {speeds[0]:.2f}x before, {speeds[1]:.2f}x now")
    return lines
