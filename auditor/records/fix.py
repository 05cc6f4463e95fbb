"""The record of fixes: verified changes of the user's source."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Change:
    """Replaces the text between two places of a file. Lines and columns from 1, in characters; the end is exclusive."""

    file: str
    line: int
    column: int
    end_line: int
    end_column: int
    text: str


@dataclass(frozen=True)
class Fix:
    """One change of the source, at one problem.

    safety: `safe` (conversions of dtypes), `unsafe` (algebra) or `display` (gives other results; shown, never applied).
    causes: of the findings that it repairs, as in `Finding.cause`; empty for an exception without a finding. before,
    after: error of the run with everything in low precision that it changes most, None if the run raises. speedup_before,
    speedup_after: predicted speed-up of the recommended plan, with all fixes before this one.
    """

    title: str
    problem: str
    file: str
    line: int
    safety: str
    causes: tuple[str, ...]
    rules: tuple[str, ...]
    run: str
    before: float | None
    after: float | None
    speedup_before: float
    speedup_after: float
    diff: str
    changes: tuple[Change, ...] = ()


@dataclass(frozen=True)
class FixedText:
    """The text of a file before and after all fixes."""

    file: str
    before: str
    after: str


@dataclass(frozen=True)
class Fixes:
    """The fixes of one audit, verified together.

    plan_before, plan_after: recommended plan, None for FP32; errors are measured, against FP32. failing_before,
    failing_after: names of the runs in low precision, without a plan, that raise or exceed the error budget. shown: changes that are only shown,
    with no result. rejected: why an audit refused changes. left: problems that no change of the source repairs. trials, audits:
    numbers of runs of edited sources.
    """

    fixes: tuple[Fix, ...]
    patch: str
    plan_before: str | None
    plan_after: str | None
    speedup_before: float
    speedup_after: float
    error_before: float | None
    error_after: float | None
    failing_before: tuple[str, ...] = ()
    failing_after: tuple[str, ...] = ()
    shown: tuple[Fix, ...] = ()
    rejected: tuple[str, ...] = ()
    left: tuple[str, ...] = ()
    trials: int = 0
    audits: int = 0
    texts: tuple[FixedText, ...] = ()
