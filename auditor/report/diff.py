"""Renders the comparison of two audits, for a terminal and as an HTML file without external resources."""

from __future__ import annotations

from ..document.compare import Comparison, figures
from ..numerics.formats import runs
from ..records import Finding, Plan
from .blocks import Block, Grid, Item, Prose, environment
from .words import SEVERITIES, count, fold, fold_paths, label, op, ratio, scope, sentence

SHOWN, ROWS = 12, 200
"""Maximum number of entries in a list of findings or verdicts, on a terminal and in HTML."""


def overview(both: Comparison, files: tuple[str, str], shown: int = SHOWN) -> list[Block]:
    """Blocks of the comparison: headline, plans, new and resolved findings, and changed verdicts."""
    was, now = both.before.recommended, both.after.recommended
    chosen = f"Recommended before: {was or 'no plan'}; now: {now or 'no plan'}."
    differ = tuple(f"{what.capitalize()}: {before} before, {after} now." for what, before, after in both.caveats)
    return [
        Prose(f"{files[0]} ({both.before.subject.name}) -> {files[1]} ({both.after.subject.name})", (), "title"),
        Prose("Verdict", (headline(both),), "error" if both.new else "good"),
        Prose("", (f"{now or 'No plan'} is recommended in both audits." if was == now else chosen,)),
        Prose("Caution", differ, "warning"),
        *_plans(both),
        *_findings("New", both.new, shown),
        *_findings("Gone", both.gone, shown),
        *_verdicts(both, shown),
    ]


def render(both: Comparison, files: tuple[str, str]) -> str:
    """Render the comparison of two audits as one HTML document."""
    title = f"{both.after.subject.name}: two audits compared"
    page = overview(both, files, ROWS)
    return environment().get_template("diff.html.jinja").render(title=title, headline=headline(both), page=page)


def headline(both: Comparison) -> str:
    """Summarize the comparison of two audits in one sentence."""
    changed = any(figures(before) != figures(after) for _, before, after in both.plans)
    same = not changed and both.before.recommended == both.after.recommended
    if same and not both.new and not both.gone and not both.verdicts:
        return "Nothing changed: the same findings, verdicts and plans."
    return f"{count(len(both.new), 'new finding')}, {len(both.gone):,} gone, {both.unchanged_findings:,} unchanged."


def error(plan: Plan | None) -> str:
    """A plan's measured error as text, or the reason why the plan has no measured error."""
    if plan is None:
        return "no plan"
    if plan.measured_error is not None:
        return ratio(plan.measured_error)
    return "failed" if runs(plan.format) else "not run"


def speedup(plan: Plan | None) -> str:
    """A plan's predicted speed-up as text, or a dash."""
    return f"{plan.predicted_speedup:.2f}x" if plan else "–"


def exceptions(before: Plan | None, after: Plan | None) -> str:
    """Text on functions of low-precision modules that only one of the two plans keeps in FP32, or ""."""
    old = [*before.exceptions] if before else []
    new = [*after.exceptions] if after else []
    added = [f"{name} in {scope(path)}" for path, name in new if (path, name) not in old]
    removed = [f"{name} in {scope(path)}" for path, name in old if (path, name) not in new]
    clauses = list[str]()
    if added:
        clauses.append(f"in FP32 now: {', '.join(added)}")
    if removed:
        clauses.append(f"no longer in FP32: {', '.join(removed)}")
    return f"Functions of low-precision modules {'; '.join(clauses)}." if clauses else ""


def _plans(both: Comparison) -> list[Block]:
    """The table of plans before and after, and changes of the functions in FP32."""
    rows = list[tuple[str, ...]]()
    bold = None
    changes = list[str]()
    for name, old, new in both.plans:
        if name == both.after.recommended:
            bold = len(rows)
        islands = " -> ".join(str(plan.islands) if plan else "–" for plan in (old, new))
        same = "same" if figures(old) == figures(new) else ""
        rows.append((name, f"{error(old)} -> {error(new)}", f"{speedup(old)} -> {speedup(new)}", islands, same))
        words = exceptions(old, new)
        if words:
            changes.append(f"{name}: {words}")
    heads = ("Plan", "Measured error", "Speed-up", "Precision changes", "")
    return [Grid(heads, tuple(rows), bold), Prose("", tuple(changes), "muted")]


def _findings(title: str, findings: tuple[Finding, ...], shown: int) -> list[Block]:
    """A list of findings, the most severe first. Equal findings in repeated blocks share one entry."""
    groups = fold(findings, lambda f: f.owner, lambda f: (f.rule, f.severity, f.op))
    groups.sort(key=lambda same: SEVERITIES.index(same[0].severity))
    items = []
    for same in groups:
        f, where = same[0], fold_paths([each.owner for each in same])
        head = f"{f.source or op(f.op)} {f.rule} {f.severity} in {where}: {sentence(f.message or f.name)}"
        items.append(Item(head, (), f.severity))
    return _list(title, count(len(findings), "finding"), items, shown)


def _verdicts(both: Comparison, shown: int) -> list[Block]:
    """A list of changed verdicts; verdicts that got worse come first."""
    ranks = {"safe": 0, "unsafe": 2}
    groups = fold(both.verdicts, lambda c: c.node.owner, lambda c: (c.node.op, c.format, c.before, c.after))
    groups.sort(key=lambda same: ranks.get(same[0].before or "", 1) - ranks.get(same[0].after or "", 1))
    items = []
    for same in groups:
        c, where = same[0], fold_paths([each.node.owner for each in same])
        changed = f"{c.before or 'absent'} -> {c.after or 'absent'}"
        items.append(Item(f"{label(c.format)}: {changed}, {op(c.node.op)} in {where}"))
    return _list("Changed", count(len(both.verdicts), "verdict"), items, shown)


def _list(title: str, about: str, items: list[Item], shown: int) -> list[Block]:
    left = f"and {len(items) - shown} more groups; --format json lists all" if len(items) > shown else ""
    return [Prose(title, (about,)), *items[:shown], Prose("", (left,), "muted")] if items else []
