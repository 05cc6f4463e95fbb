"""How a comparison of two audits reads, on a terminal and as an HTML document that loads nothing."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ..document.compare import Comparison, VerdictChange, figures
from ..numerics.formats import runs
from ..records import Finding, Plan
from .blocks import Block, Entries, Entry, Lines, Table, Title
from .prose import sentence
from .templates import environment
from .view import pattern
from .words import SEVERITIES, count, label, op, ratio, scope

SHOWN = 12
"""Kinds of findings, and of verdicts, that a terminal shows."""
ROWS = 200
"""Rows of each table of the HTML document; what is beyond them is in the output of --format json."""


@dataclass(frozen=True)
class KnownGroup:
    """Findings of one rule on one operation of identical blocks. pattern: `blocks.*.norm` where there are several."""

    first: Finding
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
    changed = any(figures(before) != figures(after) for _, before, after in found.plans)
    return changed or found.before.recommended != found.after.recommended


def groups(findings: Iterable[Finding]) -> tuple[KnownGroup, ...]:
    """Findings by severity, those that repeat over identical blocks folded into one."""
    kinds: dict[tuple[str, ...], list[Finding]] = {}
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


def error(plan: Plan | None) -> str:
    """A plan's measured error, or why there is none."""
    if plan is None:
        return "no plan"
    if plan.measured_error is None:
        return "failed" if runs(plan.format) else "not run"
    return ratio(plan.measured_error)


def speedup(plan: Plan | None) -> str:
    """A plan's predicted speed-up, or a dash."""
    return f"{plan.predicted_speedup:.2f}x" if plan and plan.predicted_speedup is not None else "–"


def exceptions(before: Plan | None, after: Plan | None) -> str:
    """Functions that stay FP32 in low modules on one side alone; nothing where they are the same."""
    first, second = _exceptions(before), _exceptions(after)
    sides = (
        ("in FP32 now", [each for each in second if each not in first]),
        ("no longer in FP32", [each for each in first if each not in second]),
    )
    said = [f"{words}: {', '.join(found)}" for words, found in sides if found]
    return f"Functions of low modules {'; '.join(said)}." if said else ""


def _exceptions(side: Plan | None) -> tuple[str, ...]:
    return tuple(f"{name} in {scope(path)}" for path, name in side.exceptions) if side else ()


def overview(found: Comparison, files: tuple[str, str]) -> list[Block]:
    """Headline, plans, findings that are new or gone, and verdicts that changed."""
    names = found.before.subject.name, found.after.subject.name
    page: list[Block] = [
        Title(f"{files[0]} ({names[0]}) -> {files[1]} ({names[1]})"),
        Lines("Verdict", (headline(found),), "error" if found.new else "good"),
        Lines("", (recommendation(found),)),
    ]
    if said := caveats(found):
        page.append(Lines("Caution", said, "warning"))
    if found.plans:
        page.append(_table(found))
        kept = [f"{name}: {words}" for name, old, new in found.plans if (words := exceptions(old, new))]
        page += [Lines("", tuple(kept), "muted")] if kept else []
    page += [_listed(title, findings) for title, findings in (("New", found.new), ("Gone", found.gone)) if findings]
    return [*page, _changed(found)] if found.verdicts else page


def _table(found: Comparison) -> Table:
    rows = [
        (
            name,
            f"{error(old)} -> {error(new)}",
            f"{speedup(old)} -> {speedup(new)}",
            "" if figures(old) != figures(new) else "same",
        )
        for name, old, new in found.plans
    ]
    bold = next((i for i, row in enumerate(rows) if row[0] == found.after.recommended), None)
    return Table(("Plan", "Measured error", "Speed-up", ""), tuple(rows), bold)


def _listed(title: str, findings: tuple[Finding, ...]) -> Entries:
    folded = groups(findings)
    entries = tuple(
        Entry(
            f"{group.first.source or op(group.first.op)} {group.first.rule} {group.first.severity} in "
            f"{scope(group.pattern)}{_times(group.times)}: {sentence(group.first.message or group.first.name)}",
            (),
            group.first.severity,
        )
        for group in folded[:SHOWN]
    )
    return Entries(title, count(len(findings), "finding"), entries, _left(len(folded)))


def _changed(found: Comparison) -> Entries:
    folded = changes(found)
    entries = tuple(
        Entry(
            f"{label(group.first.format)}: {group.first.before or 'absent'} -> {group.first.after or 'absent'}, "
            f"{op(group.first.node.op)} in {scope(group.pattern)}{_times(group.times)}"
        )
        for group in folded[:SHOWN]
    )
    return Entries("Changed", count(len(found.verdicts), "verdict"), entries, _left(len(folded)))


def _times(number: int) -> str:
    return f" x{number}" if number > 1 else ""


def _left(kinds: int) -> str:
    return f"and {kinds - SHOWN} more kinds: --format json has them all" if kinds > SHOWN else ""


def render(found: Comparison, files: tuple[str, str]) -> str:
    """The comparison as one HTML document."""
    said = {"headline": headline(found), "recommendation": recommendation(found), "caveats": caveats(found)}
    tables = {"new": groups(found.new), "gone": groups(found.gone), "changes": changes(found)}
    page = {"error": error, "speedup": speedup, "exceptions": exceptions, "files": files, "found": found, "shown": ROWS}
    return environment().get_template("diff.html.jinja").render(**said, **tables, **page)
