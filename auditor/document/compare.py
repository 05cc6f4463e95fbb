"""Two audits side by side: which findings are new, which are gone, and what became of the plans."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from ..records.measure import MEASURED
from .compared import LEVELS, Figures, Judged, Known, Record
from .steady import Contributions, unmoved


class Identified(Protocol):
    """As much of a finding as tells whether it is known."""

    @property
    def rule(self) -> str: ...
    @property
    def owner(self) -> str: ...
    @property
    def op(self) -> str: ...
    @property
    def severity(self) -> str: ...
    @property
    def formats(self) -> tuple[str, ...]: ...
    @property
    def agrees(self) -> bool | None: ...


F = TypeVar("F", bound=Identified)


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


def compare(before: Record, after: Record) -> Comparison:
    """Everything that differs, in the order of the second audit, then of the first."""
    return Comparison(
        before,
        after,
        new=fresh(before, after.findings, after.contributions, after.settings["budget"]),
        gone=_left_over(after.findings, before.findings, _identity),
        plans=tuple((n, before.plans.get(n), after.plans.get(n)) for n in {**after.plans, **before.plans}),
        verdicts=_verdict_changes(before.nodes, after.nodes),
        caveats=tuple(
            (what, before.settings[what], value)
            for what, value in after.settings.items()
            if before.settings[what] != value
        ),
    )


def fresh(before: Record, found: Sequence[F], contributions: Contributions, budget: str) -> tuple[F, ...]:
    """The findings of an audit that an earlier one does not hold, or holds as less severe.

    One that is there for another plan's sake, or a number that is not `steady.BAND` times what it was, is not new; an
    error is. contributions, budget: the audit's own; those of another budget are not comparable.
    """
    same = before.settings["budget"] == budget
    steady = unmoved(before.contributions, contributions) if same else _moved
    left: dict[tuple[str, ...], list[Known]] = defaultdict(list)
    for old in before.findings:
        left[_identity(old)].append(old)
    new: list[F] = []
    for finding in sorted(found, key=lambda f: -_level(f)):
        held = left[_identity(finding)]
        known = max((old for old in held if _covers(old, finding, steady)), key=_level, default=None)
        if known is not None:
            held.remove(known)
        elif finding.rule not in MEASURED or not steady(finding):
            new.append(finding)
    order = {id(item): i for i, item in enumerate(found)}
    return tuple(sorted(new, key=lambda f: order[id(f)]))


def _covers(old: Known, finding: Identified, steady: Callable[[Identified], bool]) -> bool:
    """Whether a finding is the old one still: as severe at most, or more so without the model having changed there."""
    if _level(old) >= _level(finding):
        return True
    borne_out = old.agrees is not None and old.agrees == finding.agrees
    return finding.severity != "error" and (borne_out or steady(finding))


def _moved(finding: Identified) -> bool:
    return False


def _level(finding: Identified) -> int:
    return LEVELS.index(finding.severity)


def _identity(finding: Identified) -> tuple[str, ...]:
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
        sides = [side.verdicts if side else {} for side in (was, now)]
        for fmt in {**sides[0], **sides[1]}:
            verdicts = tuple(side.get(fmt) for side in sides)
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
