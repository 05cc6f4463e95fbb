"""The summary page of a fleet (audits of many models): a row, a report link and the regressions of each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from ..document.compare import BAND, compare, settings
from ..document.read import load
from ..errors import AuditorError
from ..records import Audit
from ..report.blocks import environment
from ..report.diff import error, speedup
from ..report.words import count, ratio
from .running import Outcome
from .targets import FleetTarget

SLOWER = 0.97
"""A plan counts as slower if its predicted speed-up is below this share of the baseline's."""

STATES = {
    "failed": "failed",
    "worse": "got worse",
    "no plan": "without a recommended plan",
    "findings": "",
    "clean": "",
    "waiting": "not audited yet",
}
"""{state of a target: its words in the headline}, the most urgent first."""


@dataclass(frozen=True)
class Row:
    """One audited model. state: a key of STATES; said: why it failed; link: path of the report; worse: regressions."""

    name: str
    target: str
    state: str
    said: str = ""
    link: str | None = None
    plan: str | None = None
    error: str = ""
    budget: str = ""
    speedup: str = ""
    findings: Mapping[str, int] | None = None
    seconds: float | None = None
    worse: Sequence[str] = ()


def rows_of(
    targets: Sequence[FleetTarget], outcomes: Mapping[str, Outcome], directory: Path, baseline: Path | None
) -> list[Row]:
    """A row for each target, in the order of `targets`. baseline: the output directory of an earlier fleet run."""
    return [_row(target, outcomes.get(target.name), directory, baseline) for target in targets]


def headline(rows: Sequence[Row]) -> str:
    """How many models there are, and how many of them are in each state that needs attention, in one sentence."""
    found = Counter(row.state for row in rows)
    said = [f"{found[state]:,} {words}" for state, words in STATES.items() if words and found[state]]
    return f"{count(len(rows), 'model')}: {', '.join(said) if said else 'all have a recommended plan'}."


def render(rows: Sequence[Row], baseline: Path | None) -> str:
    """The page as one HTML file without external resources."""
    order = sorted(rows, key=lambda row: [*STATES].index(row.state))
    states = [(state, number) for state in STATES if (number := sum(row.state == state for row in rows))]
    page = environment().get_template("fleet.html.jinja")
    return page.render(rows=order, states=states, headline=headline(rows), baseline=baseline)


def _row(target: FleetTarget, outcome: Outcome | None, directory: Path, baseline: Path | None) -> Row:
    named = target.words[-1]
    if outcome is None:
        return Row(target.name, named, "waiting")
    before = _record(baseline / target.name) if baseline is not None else None
    after = _record(directory / target.name) if outcome.has_audit else None
    if after is None:
        lost = ["audited before, not now"] if before is not None else []
        said = outcome.said or "its output files are missing or cannot be read"
        return Row(target.name, named, "failed", said, seconds=outcome.seconds, worse=lost)
    plan = after.plans.get(after.recommended or "")
    lines = worse(before, after) if before is not None else []
    return Row(
        name=target.name,
        target=named,
        state="worse" if lines else "no plan" if plan is None else "findings" if outcome.code == 1 else "clean",
        link=f"{quote(target.name)}/report.html",
        plan=after.recommended,
        error=error(plan) if plan else "",
        budget=settings(after)["budget"],
        speedup=speedup(plan) if plan else "",
        findings=Counter(finding.severity for finding in after.findings),
        seconds=outcome.seconds,
        worse=lines,
    )


def _record(directory: Path) -> Audit | None:
    with suppress(AuditorError):
        return load(directory)
    return None


def worse(before: Audit, after: Audit) -> list[str]:
    """Sentences on what got worse between two audits: plan, error, speed-up, findings, verdicts."""
    result = compare(before, after)
    was, now = before.plans.get(before.recommended or ""), after.plans.get(after.recommended or "")
    lines = [f"{before.recommended} was recommended before, no plan now"] if before.recommended and not now else []
    if was and now and was.measured_error and now.measured_error and now.measured_error > BAND * was.measured_error:
        lines.append(f"error {ratio(was.measured_error)} before, {ratio(now.measured_error)} now")
    if was and now and now.predicted_speedup < SLOWER * was.predicted_speedup:
        lines.append(f"speed-up {was.predicted_speedup:.2f}x before, {now.predicted_speedup:.2f}x now")
    for severity in ("error", "warning"):
        new = [finding for finding in result.new if finding.severity == severity]
        lines += [f"{count(len(new), f'new {severity}')}: {', '.join(sorted({f.rule for f in new}))}"] if new else []
    unsafe = sum(change.after == "unsafe" and change.before is not None for change in result.verdicts)
    return lines + ([f"{count(unsafe, 'operation')} became unsafe"] if unsafe else [])
