"""Runs whose outputs turn Inf or NaN: the first operation that does, and verdicts that say so."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from ..artefact.strategies import strategy_of
from ..capture.paths import path_of
from ..execution.beside import first_non_finite
from ..execution.policy import Policy
from ..numerics.formats import label
from ..records import NonFinite, Verdict, Verification
from ..records.measure import MEASURED
from ..rulebook.verdicts import Judgement
from .workbench import Workbench


def judge_replay(bench: Workbench, error: float, policy: Policy) -> Verification:
    """What a replay of the recorded graph came to, where it stands for a run of the model."""
    if math.isfinite(error):
        return Verification(error, error <= bench.max_error)
    return Verification(None, nonfinite=locate_nonfinite(bench, policy))


def locate_nonfinite(bench: Workbench, policy: Policy) -> NonFinite | None:
    """The operation at which the recorded graph turns non-finite under a policy, on the first batch that shows it."""
    batches, twins = bench.checks if bench.usable(bench.checks) else bench.subject.batches, bench.capture.twins
    for number, batch in enumerate(batches, start=1):
        path = path_of(bench.capture, bench.subject, batch)
        first = first_non_finite(path, bench.subject.model, batch, policy) if path is not None else None
        if first is not None:
            first = replace(first, node=twins.get(first.node, first.node), begins=twins.get(first.begins, first.begins))
            return replace(first, batch=number, rules=_rules(bench, first, policy.format))
    return None


def _rules(bench: Workbench, first: NonFinite, fmt: str) -> tuple[str, ...]:
    """Codes of the rules that fired where the cause begins, or where it shows."""
    spoken = [(bench.capture.twins.get(f.node, f.node), f.rule) for f in bench.findings if fmt in f.formats]
    fired = [rule for where in (first.begins, first.node) for node, rule in spoken if node == where]
    return tuple(dict.fromkeys([rule for rule in fired if rule not in MEASURED] or fired))


def mark_unsafe(judged: Judgement, baselines: Mapping[str, Verification]) -> Judgement:
    """The verdicts, with those operations unsafe that turn the outputs of a baseline non-finite, though not alone; the same
    Judgement where there are none."""
    changed, verdicts = False, {name: dict(by_format) for name, by_format in judged.verdicts.items()}
    for name, base in baselines.items():
        first, (strategy, _, fmt) = base.nonfinite, name.partition("_")
        if first is not None and verdicts[first.node][fmt].verdict != "unsafe":
            limit = "range" if first.cause in ("overflow", "underflow") else "precision"
            where = (
                "" if first.begins == first.node else f" at {first.begins} ({first.begins_source or first.begins_op})"
            )
            cause = f"{first.cause}{where}{f' (batch {first.batch})' if first.batch > 1 else ''}"
            why = f"{first.value} in {label(fmt)} {strategy_of(strategy).title}, though not alone: {cause}"
            verdicts[first.node][fmt] = Verdict("unsafe", why, limit, first.batch)
            changed = True
    return Judgement(verdicts, judged.exposed) if changed else judged
