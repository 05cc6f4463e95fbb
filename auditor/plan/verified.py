"""Plans run as the artefact that a user gets: what it answers, held against FP32, and whether the budget holds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from ..criteria.criterion import FLOOR
from ..criteria.defaults import measure_outliers
from ..criteria.measure import Criteria
from ..devices import name_of
from ..errors import MeasureError, first_line, let_through
from ..isolation.answer import answer
from ..isolation.outputs import on_cpu
from ..isolation.process import loose, under
from ..numerics.formats import FORMATS, label, runs
from ..numerics.metrics import output_error
from ..records import Plan, TimeAndMemory, Timing, Today, Verification
from ..stages import tick
from ..trees import tensors_in
from ..verify import FP32, TODAY, Answers, Runs, failure_of, said_no_memory
from .nonfinite import located
from .recommend import has_fp32
from .workbench import Workbench, worst_of


def fresh_told(bench: Workbench) -> tuple[str, ...]:
    """Why plans were verified in the audit's own process, where the model has a source and they were."""
    return tuple(
        f"The plans were verified in the audit's own process: {reason}. A fresh process imported patched_model.py and built "
        "the model, and did not run its plans."
        for reason in bench.not_fresh[:1]
    )


Pair = tuple[list[torch.Tensor], list[torch.Tensor]]
"""What a model returns in FP32, and patched."""


def verify(bench: Workbench, plans: Mapping[str, Plan]) -> dict[str, Plan]:
    """The plans with what their artefacts really do: errors against FP32, and whether they hold the budget.

    Of a plan in a format that torch does not compute in there is no artefact: it stays unverified, and says so.
    """
    run = {name: plan for name, plan in plans.items() if runs(plan.format)}
    result = {name: _unrunnable(bench, plan) for name, plan in plans.items() if name not in run}
    if run:
        tick("running the patched model")
        result |= answered(bench, run)
    return {name: result[name] for name in plans}


def answered(bench: Workbench, plans: Mapping[str, Plan], files: Mapping[str, bytes] | None = None) -> dict[str, Plan]:
    """The plans with what their artefacts answer on the inputs that plans are judged on. files: see Workbench.ask."""
    expected = Answers([bench.reference(batch) for batch in bench.checks], bench.graded)
    given = bench.ask(plans, Runs.answers, files)
    return {name: judged(bench, plan, expected, given[name]) for name, plan in plans.items()}


def _unrunnable(bench: Workbench, plan: Plan) -> Plan:
    """The plan with the error of a replay of the captured graph under it, in words: nothing was measured on a model."""
    batches = bench.usable(bench.checks) or bench.usable(bench.subject.batches)
    try:
        error = f"gives an error of {bench.replayed(batches, bench.policy(plan)):.2g}"
    except Exception as refused:
        let_through(refused)
        error = f"ends with: {first_line(refused)}"
    why = f"torch has no arithmetic in {label(plan.format)}, so the plan cannot be run"
    return _failed(bench, plan, f"{why}; replaying the recorded graph with every value rounded {error}")


def judged(bench: Workbench, plan: Plan, expected: Answers, answer: Answers | str) -> Plan:
    """The plan with what its artefact answered, held against what FP32 answers; or with why it did not answer."""
    if isinstance(answer, str):
        if bench.options.native and said_no_memory(answer):
            raise torch.OutOfMemoryError(answer)  # which says nothing of the plan
        return _failed(bench, plan, answer)
    pairs = [(on_cpu(r), c) for r, c in zip(expected.outputs, answer.outputs, strict=True)]
    graded = None
    if expected.graded is not None and answer.graded is not None:
        graded = on_cpu(expected.graded), answer.graded
    try:
        result = worst_of([bench.yardstick.distance(r, c) for r, c in pairs])
        enabled = bench.yardstick.distance(*graded) if graded else None
    except MeasureError as error:
        return _failed(bench, plan, str(error))
    if graded and (otherwise := _mode_matters(plan, pairs[0], graded, bench.noise.found.joint)):
        return _failed(bench, plan, otherwise)
    is_finite = math.isfinite(result) and (enabled is None or math.isfinite(enabled))
    noise, plain = bench.noise.found, bench.yardstick.distance is output_error
    ran = _verification(
        bench,
        pairs,
        graded,
        plan.predicted_error,
        measured_error=result if is_finite else None,
        joint=None if plain else finite(worst_of([output_error(r, c) for r, c in pairs]))[0],
        apart=measure_outliers(pairs),
        finite=is_finite,
        with_gradients=enabled if is_finite else None,
        noise=noise.error,
        floor=noise.floor if noise.floor > bench.yardstick.budget else 0.0,
        ungraded=bench.noise.graded if isinstance(bench.noise.graded, str) else None,
        nonfinite=None if is_finite or plan.program else located(bench, bench.policy(plan)),
    )
    holds = is_finite and max(result, enabled or 0.0) <= bench.max_error
    verified = holds and all(one.holds for one in ran.criteria)
    return replace(plan, measured_error=ran.measured_error, verified=verified, verification=ran)


def _verification(
    bench: Workbench, pairs: Sequence[Pair], graded: Pair | None, predicted: float, **said: Any
) -> Verification:
    """What a run came to, with the user's criteria: the worst run's without gradients; held where they also are with them."""
    distance = bench.yardstick.distance
    others = [graded] if graded else []
    criteria = distance.values(pairs, others, predicted) if isinstance(distance, Criteria) else ()
    inputs, execution = "held-out" if bench.subject.held_out else "audited", bench.options.native
    return Verification(inputs=inputs, execution="native" if execution else "emulated", criteria=criteria, **said)


def _failed(bench: Workbench, plan: Plan, failure: str) -> Plan:
    ran = _verification(bench, (), None, math.nan, measured_error=None, finite=False, failure=failure)
    return replace(plan, measured_error=None, verified=False, verification=ran)


def _mode_matters(plan: Plan, without: Pair, enabled: Pair, noise: float = 0.0) -> str | None:
    """What to say of a patched model that is further off with gradients enabled than rounding, and FP32's noise, explains.

    Two runs of one plan that round differently are each as far from FP32 as the other, give or take a unit of the format.
    """
    before, after = output_error(*without), output_error(*enabled)
    if not math.isfinite(before) or after <= 2 * before + FORMATS[plan.format].epsilon + FLOOR * noise:
        return None
    return f"with gradients enabled it answers otherwise: error {after:.2g}, where it is {before:.2g} without"


def finite(error: float) -> tuple[float | None, bool]:
    """What is kept of an error, and whether it is finite."""
    return (error, True) if math.isfinite(error) else (None, False)


def is_outdone(plan: Plan, baseline: Verification) -> bool:
    """Whether the model is closer to FP32 without the plan, by more than FP32's noise. With everything low the two are one."""
    if plan.measured_error is None or baseline.measured_error is None or not has_fp32(plan):
        return False
    noise = FLOOR * (plan.verification.noise or 0.0) if plan.verification else 0.0
    return plan.measured_error > baseline.measured_error + noise


def today_of(bench: Workbench) -> Today | None:
    """The model in FP32 under the caller's own flags, on the inputs that plans are checked on; None where it is what it is
    in IEEE arithmetic, as far as that is from itself."""
    allowed = loose(bench.flags, bench.options.where)
    if not allowed and not (bench.options.native and bench.flags.get("cudnn.benchmark")):
        return None
    try:
        with under(bench.flags):
            result = [answer(bench.subject.model, batch, seed=bench.options.seed) for batch in bench.checks]
        pairs = ((bench.reference(batch), one) for batch, one in zip(bench.checks, result, strict=True))
        worst = worst_of([bench.yardstick.distance(*pair) for pair in pairs])
    except Exception as error:
        let_through(error)
        return Today(allowed, None, False, failure_of(error))
    return None if worst <= FLOOR * bench.noise.found.error else Today(allowed, *finite(worst))


WAYS = ("eager", "compiled", "cuda_graph")
"""How a model is run to be timed, by the names of Timed."""


def timed_plans(bench: Workbench, plans: Mapping[str, Plan]) -> tuple[dict[str, Plan], Timing]:
    """The plans with what one forward takes under each, and what that is held against.

    On a GPU they are run there; on a CPU they are run in half precision by the CPU itself, which emulates nothing, and the
    times say nothing of a GPU. FP32, and what plans keep in FP32, computes in IEEE arithmetic.
    """
    today = bool(loose(bench.flags, bench.options.where))
    run = {name: plan for name, plan in plans.items() if runs(plan.format) and plan.program is None}
    names = [FP32, *([TODAY] if today else []), *run]
    question = partial(Runs.time, flags=dict(bench.flags), threads=torch.get_num_threads())
    given: dict[str, TimeAndMemory | str] = bench.ask(run, question, names=names)
    missing = (*WAYS[:2], "memory")
    result = {
        n: one if isinstance(one, TimeAndMemory) else TimeAndMemory(missing=dict.fromkeys(missing, one))
        for n, one in given.items()
    }
    whole = result[FP32]
    timing = Timing(
        device=name_of(bench.options.where),
        batch=next((x.shape[0] for x in tensors_in(bench.checks[0]) if x.dim() and not x.is_nested), None),
        threads=torch.get_num_threads(),
        fp32=whole,
        fp32_today=against(result[TODAY], whole) if today else None,
    )
    told = {name: replace(against(result[name], whole), decides=bench.options.native) for name in run}
    return {name: replace(plan, timed=told.get(name)) for name, plan in plans.items()}, timing


def against(found: TimeAndMemory, whole: TimeAndMemory) -> TimeAndMemory:
    """With how many times as fast as FP32 it is, run in the same way, and what share of its memory it takes."""
    changed: dict[str, Any] = {}
    for way in WAYS:
        times, fp32 = getattr(found, way), getattr(whole, way)
        if times is not None and fp32 is not None:
            low, high = fp32.low / times.high, fp32.high / times.low
            changed[way] = replace(times, speedup=fp32.median / times.median, speedup_low=low, speedup_high=high)
    if found.memory is not None and whole.memory:
        changed["memory_share"] = found.memory / whole.memory
    return replace(found, **changed)
