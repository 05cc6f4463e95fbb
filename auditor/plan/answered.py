"""What the artefacts of plans answer: in a process of their own where the model can be made there, else in this one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from torch import nn

from .. import ranks
from ..patch.emit import emit
from ..patch.runtime import apply_plan
from ..patch.table import plan_table
from ..records import Plan
from ..state.members import size_of
from ..verify import OFFLOADED, WITH_GRADIENTS, Answers, NotHandedOver, answers_of, answers_under
from .scores import raising
from .workbench import Workbench

Given = dict[str, Answers | str]


def answered(bench: Workbench, plans: Mapping[str, Plan], waiting: Callable[[], None]) -> Given:
    """What the model answers under each plan, on each of the bench's checks, or the one-line reason why it does not.

    The ranks share the checks. waiting: called every second.
    """
    given: Given = {}
    if ranks.part(bench.checks):
        fresh = bench.subject.origin is not None and not bench.not_fresh
        given = _in_fresh_process(bench, plans, waiting) if fresh else _in_this_process(bench, plans)
    bench.holding.update({name: one.held for name, one in given.items() if isinstance(one, Answers) and one.held})
    brought = [one for one in ranks.each_rank("patched models", given) if one]
    return {name: _joined([one[name] for one in brought], len(bench.checks)) for name in plans}


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


def _joined(parts: Sequence[Answers | str], count: int) -> Answers | str:
    """The parts in the order of the checks; why the first of them failed, where one did."""
    failures = [part for part in parts if isinstance(part, str)]
    if failures:
        return min(failures, key=lambda failure: failure.startswith(WITH_GRADIENTS))
    outputs = [part.outputs for part in parts if isinstance(part, Answers)]
    first = parts[0]
    assert isinstance(first, Answers)
    return Answers([outputs[i % len(outputs)][i // len(outputs)] for i in range(count)], first.graded)


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
    gradients, most = bench.graded is not None and ranks.leads(), bench.most  # of the model before it is patched
    batches = ranks.part(bench.checks)

    def run(model: nn.Module) -> Answers | str:
        return answers_of(model, batches, bench.device, bench.seed, gradients, most)

    return answers_under(bench.subject.model, lambda model: apply_plan(model, plan_table(plan)), run)
