"""Two audits side by side: which findings are new, which are gone, and what became of the plans."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from .compared import LEVELS, Figures, Judged, Known, Record


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


def fresh(known: Iterable[Known], found: Sequence[F]) -> tuple[F, ...]:
    """The findings, of an audit or of a file, that `known` does not hold, or holds as less severe."""
    severities: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for old in known:
        severities[_identity(old)].append(LEVELS.index(old.severity))
    new: list[F] = []
    for finding in sorted(found, key=lambda f: -LEVELS.index(f.severity)):
        held = sorted(severities[_identity(finding)])
        if held and held[-1] >= LEVELS.index(finding.severity):
            severities[_identity(finding)].remove(held[-1])
        else:
            new.append(finding)
    order = {id(item): i for i, item in enumerate(found)}
    return tuple(sorted(new, key=lambda f: order[id(f)]))


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
