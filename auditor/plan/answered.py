"""What the artefacts of plans answer: in a process of their own where the model can be made there, else in this one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from .. import ranks
from ..patch.emit import emit
from ..records import Plan
from ..state.members import size_of
from ..verify import WITH_GRADIENTS, Answers, NotHandedOver, Runs, in_hand
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
    brought = [one for one in ranks.each_rank("patched models", given) if one]
    return {name: _joined([one[name] for one in brought], len(bench.checks)) for name in plans}


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
    gradients, batches = bench.graded is not None and ranks.leads(), ranks.part(bench.checks)
    load = partial(in_hand, bench.subject.model, plans)
    runs = Runs(load, batches, bench.device, bench.seed, gradients, bench.most)
    return {name: runs.answers(name) for name in plans}
