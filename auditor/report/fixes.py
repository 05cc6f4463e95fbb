"""Shows verified changes of the source: as a table, beside each finding, and in SARIF."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any
from urllib.parse import quote

from ..artefact.strategies import strategy_of
from ..records import Audit, Finding, Fix, Fixes
from .blocks import Block, Grid, Prose
from .words import count, label, ratio, sentence

SAFETY = {
    "safe": "safe: only converts dtypes",
    "unsafe": "unsafe: rewrites the algebra, equal up to rounding",
    "display": "display only: gives other results",
}
"""{safety of a fix: its meaning}."""
STEP_SAFETY = {
    "safe": "safe: without low precision, the step computes the same",
    "unsafe": "unsafe: the step computes something else in FP32, too",
}
"""The same for fixes of a training step."""
HEADS = ("change", "problem", "applies", "error", "speed-up")

CAPTION = (
    "error: before and after, with everything in low precision, of the run that changes most. speed-up: predicted, of the "
    "recommended plan, after the changes above"
)


def fixes_of(audit: Audit, members: Iterable[Finding]) -> tuple[Fix, ...]:
    """The fixes that repair the cause of some findings."""
    causes = {finding.cause for finding in members if finding.cause}
    fixed = audit.fixed.fixes if audit.fixed is not None else ()
    return tuple(fix for fix in fixed if causes.intersection(fix.causes))


def offer(audit: Audit) -> str:
    """A sentence on what `fix` would gain, from the plan that is predicted after a repair of the source; "" for nothing."""
    if not audit.repairs or not audit.subject.file or audit.fixed is not None:
        return ""
    best = audit.repairs[0]
    causes = " and ".join(best.causes[:2])
    return (
        f"`python -m auditor fix {audit.subject.target}` searches for a change of your source that repairs this ({causes}), and "
        f"runs it. The plan after it is predicted at {best.speedup:.2f}x instead of {best.before:.2f}x."
    )


def fix_words(fix: Fix) -> str:
    """A sentence on a fix: what it does, how safe it is, and what it gains."""
    gain = f"the recommended plan is then predicted at {fix.speedup_after:.2f}x instead of {fix.speedup_before:.2f}x"
    run = run_words(fix.run)
    errors = f"{run}, the error is {_error(fix.after)} instead of {_error(fix.before)}"
    if fix.before is None:
        errors = f"{run}, the model runs, with an error of {_error(fix.after)}"
    return f"Verified fix ({fix.safety}): {fix.title}. With everything in {errors}; {gain}."


def run_words(name: str) -> str:
    """The name of a run without a plan, such as `cast_fp16`, in words."""
    strategy, _, fmt = name.partition("_")
    return f"{label(fmt)} {strategy_of(strategy).title}"


def _error(error: float | None) -> str:
    if error is None:
        return "raises"
    return ratio(error) if math.isfinite(error) else "Inf or NaN"


def table(fixes: Fixes) -> Grid:
    """A row for each fix."""
    rows = tuple(
        (
            f"{fix.title} ({fix.file}:{fix.line})",
            fix.problem,
            fix.safety,
            f"{_error(fix.before)} to {_error(fix.after)}",
            f"{fix.speedup_before:.2f}x to {fix.speedup_after:.2f}x",
        )
        for fix in fixes.fixes
    )
    return Grid(HEADS, rows, texts=3, caption=CAPTION)


def step_overview(fixes: Fixes, name: str) -> list[Block]:
    """The result of a search for fixes of a training step, for a terminal."""
    rows = tuple(
        (f"{fix.title} ({fix.file}:{fix.line})", fix.problem, fix.safety, f"{_loss(fix.before)} to {_loss(fix.after)}")
        for fix in fixes.fixes
    )
    words = "No fix: no repair of a named problem passed a rehearsal."
    if not fixes.failing_before:
        words = "No fix: a rehearsal of the step as written shows no problem with a known repair."
    if rows:
        left = f"{count(len(fixes.failing_after), 'problem')} left" if fixes.failing_after else "no problem left"
        words = f"{count(len(rows), 'fix', 'fixes')}, {left}. The fixed step was rehearsed, as written and in FP32."
    kinds = dict.fromkeys(fix.safety for fix in fixes.fixes)
    return [
        Prose(f"Fixes of {name}", (), "title"),
        Prose("Result", (words,)),
        Grid(("change", "problem", "applies", "final loss as written"), rows, texts=3),
        Prose("Applies", tuple(f"{STEP_SAFETY[kind]}." for kind in kinds)),
        Prose("Left", tuple(f"{kind}." for kind in fixes.failing_after), listed=True),
        Prose("Trials", (f"{count(fixes.trials, 'edited step')} rehearsed.",), "muted"),
    ]


def _loss(value: float | None) -> str:
    return "not finite" if value is None or not math.isfinite(value) else f"{value:.4g}"


def overview(fixes: Fixes, name: str) -> list[Block]:
    """The result of a search for fixes, for a terminal."""
    page: list[Block] = [Prose(f"Fixes of {name}", (), "title"), Prose("Result", (headline(fixes),))]
    if fixes.fixes:
        page.append(table(fixes))
        kinds = dict.fromkeys(fix.safety for fix in fixes.fixes)
        page.append(Prose("Applies", tuple(f"{SAFETY[kind]}." for kind in kinds)))
    if fixes.rejected:
        page.append(Prose("Rejected", tuple(sentence(f"one set of changes: {why}") for why in fixes.rejected)))
    page.append(Prose("Left", tuple(map(sentence, fixes.left)), listed=True))
    for fix in fixes.shown:
        page.append(
            Prose(
                "Only shown",
                (f"{fix.title} at {fix.file}:{fix.line} gives other results, so it was not run; fixes.json has it.",),
            )
        )
    tried = f"{count(fixes.trials, 'edited source')} run, {count(fixes.audits, 'audit')} of edited sources."
    page.append(Prose("Trials", (tried,), "muted"))
    return [block for block in page if block]


def headline(fixes: Fixes) -> str:
    """The number of fixes, and what they gain together, in one or two sentences."""
    if not fixes.fixes:
        tried = f"none of {count(fixes.trials, 'tried change')} passed" if fixes.trials else "there was nothing to try"
        return f"No fix: {tried}."
    before = f"{fixes.speedup_before:.2f}x"
    words = f"{count(len(fixes.fixes), 'fix', 'fixes')}: the recommended plan is predicted at {fixes.speedup_after:.2f}x instead of {before}."
    if fixed := [name for name in fixes.failing_before if name not in fixes.failing_after]:
        listed = ", ".join(map(run_words, fixed))
        words += f" Without a plan, the model now runs within the error budget in {listed}."
    return f"{words} The fixed model was run and audited, on all inputs."


def sarif_fixes(audit: Audit, members: Iterable[Finding]) -> dict[str, Any]:
    """The `fixes` of a SARIF result; {} without fixes, since SARIF allows no empty list of changes."""
    listed = [_sarif_fix(fix) for fix in fixes_of(audit, members) if fix.changes]
    return {"fixes": listed} if listed else {}


def _sarif_fix(fix: Fix) -> dict[str, Any]:
    by_file: dict[str, list[dict[str, Any]]] = {}
    for change in fix.changes:
        region = {
            "startLine": change.line,
            "startColumn": change.column,
            "endLine": change.end_line,
            "endColumn": change.end_column,
        }
        replacement = {"deletedRegion": region, "insertedContent": {"text": change.text}}
        by_file.setdefault(change.file, []).append(replacement)
    changes = [
        {"artifactLocation": {"uri": quote(file), "uriBaseId": "%SRCROOT%"}, "replacements": replacements}
        for file, replacements in by_file.items()
    ]
    return {"description": {"text": fix_words(fix)}, "artifactChanges": changes}
