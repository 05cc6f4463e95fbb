"""Time and memory of FP32 and of every plan, measured on the emitted artefact where there is one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..artefact.emit import emit
from ..devices import let_go, name_of
from ..isolation.members import size_of
from ..isolation.process import loose
from ..numerics.formats import runs
from ..records import Plan, Timed, Times, Timing
from ..trees import tensors_in
from ..verify import FP32, TODAY, NotHandedOver, Runs, Verifier, in_hand
from .scores import raising
from .workbench import Workbench

WAYS = ("eager", "compiled", "cuda_graph")
"""How a model is run to be timed, by the names of Timed."""


def timed_plans(
    bench: Workbench, plans: Mapping[str, Plan], tick: Callable[[str], None]
) -> tuple[dict[str, Plan], Timing]:
    """The plans with what one forward takes under each, and what that is held against.

    On a GPU they are run there; on a CPU they are run in half precision by the CPU itself, which imitates nothing, and the
    times say nothing of a GPU. FP32, and what plans keep in FP32, computes in IEEE arithmetic.
    """
    today = bool(loose(bench.flags, bench.device))
    run = {name: plan for name, plan in plans.items() if runs(plan.format) and plan.program is None}
    names = [FP32, *([TODAY] if today else []), *run]
    found = {
        name: one if isinstance(one, Timed) else _lost(one) for name, one in _times(bench, run, names, tick).items()
    }
    whole = found[FP32]
    timing = Timing(
        device=name_of(bench.device),
        batch=_entries(bench),
        threads=torch.get_num_threads(),
        fp32=whole,
        fp32_today=against(found[TODAY], whole) if today else None,
    )
    told = {name: replace(against(found[name], whole), decides=bench.native) for name in run}
    return {name: replace(plan, timed=told.get(name)) for name, plan in plans.items()}, timing


def against(found: Timed, whole: Timed) -> Timed:
    """With how many times as fast as FP32 it is, run in the same way, and what share of its memory it takes."""

    def held(times: Times | None, fp32: Times | None) -> Times | None:
        if times is None or fp32 is None:
            return times
        return replace(
            times,
            speedup=fp32.median / times.median,
            speedup_low=fp32.low / times.high,
            speedup_high=fp32.high / times.low,
        )

    changed: dict[str, Any] = {way: held(getattr(found, way), getattr(whole, way)) for way in WAYS}
    if found.memory is not None and whole.memory:
        changed["memory_share"] = found.memory / whole.memory
    return replace(found, **changed)


def _times(
    bench: Workbench, plans: Mapping[str, Plan], names: Sequence[str], tick: Callable[[str], None]
) -> dict[str, Timed | str]:
    """In a process of its own, for a model that can be made there; this one keeps no memory of a GPU that it does not use."""
    subject = bench.subject
    if subject.origin is not None:
        let_go(bench.device)
        where: dict[str, Any] = {"seed": bench.seed, "device": bench.device, "timeout": bench.timeout}
        batches = bench.checks[:1]
        expected = bench.reference(batches[0])
        try:
            with Verifier.begun(batches, expected=expected, **where) as (verifier, folder):
                file, emitted = Path(folder, "patched_model.py"), {**plans, **raising(subject)}
                file.write_text(emit(subject.origin, size_of(subject.model), emitted, None, folder), "utf-8")
                return verifier.times(file, names, bench.flags, lambda words: tick("timing"))
        except NotHandedOver:
            pass
    runs = Runs(partial(in_hand, subject.model, plans), bench.checks[:1], bench.device, bench.seed)
    return {name: runs.time(name, bench.flags, apart=False) for name in names}


def _lost(why: str) -> Timed:
    return Timed(missing=dict.fromkeys((*WAYS[:2], "memory"), why))


def _entries(bench: Workbench) -> int | None:
    """Entries along the first axis of the first tensor that has one."""
    return next((x.shape[0] for x in tensors_in(bench.checks[0]) if x.dim() and not x.is_nested), None)
