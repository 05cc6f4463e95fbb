"""What the artefacts of plans answer: in a process of their own where the model can be made there, else in this one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

from torch import nn

from ..isolation.members import size_of
from ..patch.emit import emit
from ..patch.runtime import apply_plan
from ..patch.table import plan_table
from ..records import Plan
from ..verify import OFFLOADED, Answers, NotHandedOver, answers_of, answers_under
from .scores import raising
from .workbench import Workbench

Given = dict[str, Answers | str]


def answered(bench: Workbench, plans: Mapping[str, Plan], waiting: Callable[[], None]) -> Given:
    """What the model answers under each plan, on each of the bench's checks, or the one-line reason why it does not.

    waiting: called every second.
    """
    fresh = bench.subject.origin is not None and not bench.not_fresh
    given = _in_fresh_process(bench, plans, waiting) if fresh else _in_this_process(bench, plans)
    bench.holding.update({name: one.held for name, one in given.items() if isinstance(one, Answers) and one.held})
    return given


def holding_told(bench: Workbench) -> tuple[str, ...]:
    """How the weights of patched models were held, where memory was limited."""
    runs = Counter(bench.holding.values())
    others = [reason for reason in runs if reason != OFFLOADED]
    told = ["The patched models were run with the weights of one module in memory at a time, by accelerate's hooks."]
    return (
        *(told if runs[OFFLOADED] else ()),
        *(
            f"{runs[reason]} of {runs.total()} patched models were run with all weights mapped into memory, and not by "
            f"accelerate's hooks: {reason}."
            for reason in others
        ),
    )


def _in_fresh_process(
    bench: Workbench, plans: Mapping[str, Plan], waiting: Callable[[], None]
) -> dict[str, Answers | str]:
    subject = bench.subject
    try:
        verifier, file = bench.verifier, Path(bench.scratch, "patched_model.py")
        emitted = {**plans, **raising(subject)}
        file.write_text(emit(subject.origin, size_of(subject.model), emitted, None, file.parent), encoding="utf-8")
        return verifier.answers(file, list(plans), waiting)
    except NotHandedOver as problem:
        bench.not_fresh.append(str(problem))
        return _in_this_process(bench, plans)


def fresh_told(bench: Workbench) -> tuple[str, ...]:
    """Why plans were verified in the audit's own process, where the model has a source and they were."""
    return tuple(
        f"The plans were verified in the audit's own process: {reason}. A fresh process imported patched_model.py and built "
        "the model, and did not run its plans."
        for reason in bench.not_fresh[:1]
    )


def _in_this_process(bench: Workbench, plans: Mapping[str, Plan]) -> dict[str, Answers | str]:
    """Models that were handed over as objects have no source to build them from again: they are patched for a while."""
    return {name: _patched_here(bench, plan) for name, plan in plans.items()}


def _patched_here(bench: Workbench, plan: Plan) -> Answers | str:
    gradients, most = bench.graded is not None, bench.most  # of the model before it is patched

    def run(model: nn.Module) -> Answers | str:
        return answers_of(model, bench.checks, bench.device, bench.seed, gradients, most)

    return answers_under(bench.subject.model, lambda model: apply_plan(model, plan_table(plan)), run)
