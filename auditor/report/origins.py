"""Where errors are born and what merely inherits them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from ..records import FlaggedRegion, NodeError, NodeReport, NonFinite
from ..records.audit import Audit
from .nonfinite import cause, nonfinite_runs
from .view import pattern
from .words import count, label

SHOWN = 8


@dataclass(frozen=True)
class Birth:
    """A node where a non-finite value first appears, and the nodes after it that only pass it on.

    why: of a node that is finite alone, why it is not in a run of all. times: identical blocks in which the same happens, this one, the first, among them.
    """

    report: NodeReport
    cause: str
    heirs: int
    last_heir: NodeReport | None
    times: int = 1
    why: str = ""


@dataclass(frozen=True)
class Source:
    """A node that adds rounding error of its own.

    moved: how far it moves the outputs, low; predicted: whether that was not run. share: of the summed squares of the own
    contributions of all nodes that some strategy lowers.
    """

    report: NodeReport
    moved: float
    predicted: bool
    share: float


@dataclass(frozen=True)
class Origins:
    """Births, sources and flagged regions in one format, the largest first; `more_births` were left out.

    linearity: whether predictions hold, in words; "" where none comes near the budget. broken: whether a run of the whole
    model is not finite.
    """

    format: str
    label: str
    births: tuple[Birth, ...]
    more_births: int
    sources: tuple[Source, ...]
    regions: tuple[FlaggedRegion, ...]
    linearity: str
    broken: bool


def origins(audit: Audit, fmt: str) -> Origins:
    """Cause apart from consequence, for one format."""
    kinds: dict[tuple[str, str, str | None], list[NodeReport]] = {}
    runs = [run for run in nonfinite_runs(audit) if run.format == fmt]
    named = {run.first.node: run.first for run in runs if run.first is not None}
    for report in audit.nodes:
        if fmt in report.errors and (report.errors[fmt].born or report.node.name in named):
            kind = (pattern(report.node.owner), report.node.op, report.errors[fmt].cause)
            kinds.setdefault(kind, []).append(report)
    born = list(kinds.values())
    readers = _readers(audit)
    return Origins(
        fmt,
        label(fmt),
        tuple(replace(_birth(same[0], fmt, readers, named), times=len(same)) for same in born[:SHOWN]),
        max(len(born) - SHOWN, 0),
        _sources(audit, fmt),
        _regions(audit, fmt),
        _linearity(audit, fmt),
        bool(runs),
    )


def _readers(audit: Audit) -> Mapping[str, list[NodeReport]]:
    readers: dict[str, list[NodeReport]] = {}
    for report in audit.nodes:
        for name in report.node.inputs:
            readers.setdefault(name, []).append(report)
    return readers


def _birth(
    report: NodeReport, fmt: str, readers: Mapping[str, list[NodeReport]], named: Mapping[str, NonFinite]
) -> Birth:
    heirs: dict[str, NodeReport] = {}
    frontier = [report]
    while frontier:
        for reader in readers.get(frontier.pop().node.name, ()):
            error = reader.errors.get(fmt)
            if reader.node.name in heirs or error is None or error.born or not _broken(error):
                continue
            heirs[reader.node.name] = reader
            frontier.append(reader)
    last = next(reversed(heirs.values()), None)
    error, first = report.errors[fmt], named.get(report.node.name)
    if error.unsupported or error.disagreement or error.overflow or error.nan:
        return Birth(report, "NaN" if error.cause == "nan" else error.cause or "not known", len(heirs), last)
    if first is None:
        return Birth(report, "Inf or NaN", len(heirs), last, why="The operation alone stays finite.")
    return Birth(report, first.value, len(heirs), last, why=cause(first))


def _broken(error: NodeError) -> bool:
    return error.overflow + error.nan > 0 or (
        error.propagated_error is not None and not math.isfinite(error.propagated_error)
    )


def _sources(audit: Audit, fmt: str) -> tuple[Source, ...]:
    low = [r for r in audit.nodes if r.node.floating and fmt in r.contributions and r.exposed.get(fmt, True)]
    own = [(r, r.contributions[fmt].own) for r in low]
    finite = [(r, value) for r, value in own if math.isfinite(value) and value > 0]
    total = sum(value * value for _, value in finite)
    top = sorted(finite, key=lambda pair: -pair[1])[:SHOWN]
    return tuple(_source(r, fmt, value * value / total) for r, value in top)


def _source(report: NodeReport, fmt: str, share: float) -> Source:
    found = report.contributions[fmt]
    return Source(report, found.isolated, found.decided_by == "first-order", share)


def _regions(audit: Audit, fmt: str) -> tuple[FlaggedRegion, ...]:
    """Regions of more than one operation; those that cannot run, or end non-finite, come first."""
    found = [region for region in audit.regions if region.format == fmt and len(region.nodes) > 1]
    worst = [math.inf if r.error is None or math.isnan(r.error) else r.error for r in found]
    order = sorted(range(len(found)), key=lambda i: -worst[i])
    return tuple(found[i] for i in order[:SHOWN])


def _linearity(audit: Audit, fmt: str) -> str:
    """How the predictions that were run fared, and what was made of it."""
    found = next((one for one in audit.linearity if one.format == fmt), None)
    if found is None:
        return ""
    one = found.compared == 1
    spread = f"{found.least:.2g} to {found.most:.2g} times what the runs say, {found.median:.2g} times in the median"
    words = [
        f"{count(found.compared, 'operation')} predicted to first order {'was' if one else 'were'} also run: "
        + (f"the prediction is {found.median:.2g} times what the run says." if one else f"predictions are {spread}.")
    ]
    if not found.holds:
        words.append("First order does not hold on this model, so more were run.")
    if beyond := found.confirmed + found.refuted:
        words.append(f"Runs bear out {found.confirmed:,} of {count(beyond, 'prediction')} beyond the budget.")
    if found.left:
        words.append(f"{found.left:,} more {'is' if found.left == 1 else 'are'} beyond it by prediction alone.")
    return " ".join(words)
