"""What the artefacts of plans answer: in a process of their own where the model can be made there, else in this one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from ..isolation.members import size_of
from ..patch.emit import emit
from ..records import Plan
from ..verify import Answers, NotHandedOver, Runs, in_hand
from .scores import raising
from .workbench import Workbench

Given = dict[str, Answers | str]


def answered(bench: Workbench, plans: Mapping[str, Plan], waiting: Callable[[], None]) -> Given:
    """What the model answers under each plan, on each of the bench's checks, or the one-line reason why it does not.

    waiting: called every second.
    """
    fresh = bench.subject.origin is not None and not bench.not_fresh
    return _in_fresh_process(bench, plans, waiting) if fresh else _in_this_process(bench, plans)


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
    gradients = bench.graded is not None  # of the model before it is patched
    load = partial(in_hand, bench.subject.model, plans)
    runs = Runs(load, bench.checks, bench.device, bench.seed, gradients, bench.most)
    return {name: runs.answers(name) for name in plans}
