"""Time and memory of FP32 and of every plan, measured on the emitted artefact where there is one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from ..devices import name_of
from ..isolation.process import loose
from ..numerics.formats import runs
from ..records import Plan, Timed, Times, Timing
from ..trees import tensors_in
from ..verify import FP32, TODAY
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
    given = bench.ask(
        run,
        lambda verifier, file: verifier.times(file, names, bench.flags, lambda: tick("timing")),
        lambda runs: {name: runs.time(name, bench.flags, apart=False) for name in names},
    )
    missing = (*WAYS[:2], "memory")
    found = {
        n: one if isinstance(one, Timed) else Timed(missing=dict.fromkeys(missing, one)) for n, one in given.items()
    }
    whole = found[FP32]
    timing = Timing(
        device=name_of(bench.device),
        batch=next((x.shape[0] for x in tensors_in(bench.checks[0]) if x.dim() and not x.is_nested), None),
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
