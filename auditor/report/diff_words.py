"""How a comparison of two audits reads, in the terminal and in HTML alike."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ..document.compare import Comparison, VerdictChange
from ..document.compared import Figures, Known
from ..numerics.formats import runs
from .view import pattern
from .words import SEVERITIES, count, ratio, scope


@dataclass(frozen=True)
class KnownGroup:
    """Findings of one rule on one operation of identical blocks. pattern: `blocks.*.norm` where there are several."""

    first: Known
    pattern: str
    times: int


@dataclass(frozen=True)
class ChangeGroup:
    """Changes of verdict that are alike in all but the number of the block."""

    first: VerdictChange
    pattern: str
    times: int


def headline(found: Comparison) -> str:
    """The comparison in one sentence."""
    if not found.new and not found.gone and not found.verdicts and not _plans_differ(found):
        return "Nothing changed: the same findings, verdicts and plans."
    return f"{count(len(found.new), 'new finding')}, {len(found.gone):,} gone, {found.kept:,} as before."


def recommendation(found: Comparison) -> str:
    """Whether another plan is recommended now."""
    was, now = found.before.recommended, found.after.recommended
    if was == now:
        return f"{now or 'No plan'} is recommended in both."
    return f"Recommended was {was or 'no plan'}; now it is {now or 'no plan'}."


def caveats(found: Comparison) -> tuple[str, ...]:
    """Settings that differ, without which the numbers would compare better."""
    return tuple(f"{what.capitalize()}: {before} before, {after} now." for what, before, after in found.caveats)


def _plans_differ(found: Comparison) -> bool:
    return any(before != after for _, before, after in found.plans) or (
        found.before.recommended != found.after.recommended
    )


def groups(findings: Iterable[Known]) -> tuple[KnownGroup, ...]:
    """Findings by severity, those that repeat over identical blocks folded into one."""
    kinds: dict[tuple[str, ...], list[Known]] = {}
    for finding in findings:
        kinds.setdefault((finding.rule, finding.severity, pattern(finding.owner), finding.op), []).append(finding)
    folded = [
        KnownGroup(same[0], pattern(same[0].owner) if len(same) > 1 else same[0].owner, len(same))
        for same in kinds.values()
    ]
    return tuple(sorted(folded, key=lambda group: SEVERITIES.index(group.first.severity)))


def changes(found: Comparison) -> tuple[ChangeGroup, ...]:
    """Changes of verdict, those for the worse first, folded like findings."""
    kinds: dict[tuple[str | None, ...], list[VerdictChange]] = {}
    for change in found.verdicts:
        key = (pattern(change.node.owner), change.node.op, change.format, change.before, change.after)
        kinds.setdefault(key, []).append(change)
    folded = [
        ChangeGroup(same[0], pattern(same[0].node.owner) if len(same) > 1 else same[0].node.owner, len(same))
        for same in kinds.values()
    ]
    return tuple(sorted(folded, key=lambda group: -_worsening(group.first)))


def _worsening(change: VerdictChange) -> int:
    ranks = {"safe": 0, "untested": 1, "sensitive": 1, "unsafe": 2}
    return ranks.get(change.after or "", 0) - ranks.get(change.before or "", 0)


def error(plan: Figures | None) -> str:
    """A plan's measured error, or why there is none."""
    if plan is None:
        return "no plan"
    if plan.measured_error is None:
        return "failed" if runs(plan.format) else "not run"
    return ratio(plan.measured_error)


def speedup(plan: Figures | None) -> str:
    """A plan's predicted speed-up, or a dash."""
    return f"{plan.predicted_speedup:.2f}x" if plan and plan.predicted_speedup is not None else "–"


def exceptions(before: Figures | None, after: Figures | None) -> str:
    """Functions that stay FP32 in low modules on one side alone; nothing where they are the same."""
    first, second = _exceptions(before), _exceptions(after)
    sides = (
        ("in FP32 now", [each for each in second if each not in first]),
        ("no longer in FP32", [each for each in first if each not in second]),
    )
    said = [f"{words}: {', '.join(found)}" for words, found in sides if found]
    return f"Functions of low modules {'; '.join(said)}." if said else ""


def _exceptions(side: Figures | None) -> tuple[str, ...]:
    return tuple(f"{name} in {scope(path)}" for path, name in side.exceptions) if side else ()
