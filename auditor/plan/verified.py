"""Runs plans as the artefact that a user gets, compares them with FP32, and locates the operation that breaks them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from ..capture.paths import path_of
from ..criteria.criterion import FLOOR
from ..criteria.defaults import measure_outliers
from ..criteria.measure import Criteria
from ..errors import MeasureError, first_line, let_through
from ..execution.beside import first_non_finite, policy_of
from ..execution.policy import Policy
from ..isolation.outputs import on_cpu
from ..isolation.process import loose, under
from ..isolation.run_model import run_model
from ..numerics.formats import FORMATS, label, runs
from ..numerics.metrics import output_error
from ..records import NonFinite, Plan, Today, Verification
from ..stages import tick
from ..verify.loaders import in_hand
from ..verify.running import Answers, ModelRuns, failure_of, said_no_memory, says_nothing
from .context import MeasuredModel, worst_of
from .scatter import are_few, scattered_error

Pair = tuple[list[torch.Tensor], list[torch.Tensor]]
"""Outputs of the model in FP32, and of the patched model, on one batch."""


MOST_FLOPS = 2_000_000_000
"""FLOPs of a forward up to which `note_gpu_only` runs it: a few seconds, where a CPU computes FP16 in software."""


def verify(
    model: MeasuredModel, plans: Mapping[str, Plan], files: Mapping[str, bytes] | None = None
) -> dict[str, Plan]:
    """The plans with the results of running their artefacts: errors against FP32, and whether they meet the budget.

    If torch cannot compute in a plan's format, the plan has no artefact and remains unverified, with that reason.
    files: contents of exported programs, by file name.
    """
    run = {name: plan for name, plan in plans.items() if runs(plan.format)}
    result = {name: _unrunnable(model, plan) for name, plan in plans.items() if name not in run}
    if run:
        tick("running the patched model" if files is None else "running the programs")
        expected = Answers([model.reference(batch) for batch in model.checks], model.graded_outputs)
        given = model.ask(run, ModelRuns.answers, files)
        result |= {name: judge_answers(model, plan, expected, given[name]) for name, plan in run.items()}
    return {name: result[name] for name in plans}


def _unrunnable(model: MeasuredModel, plan: Plan) -> Plan:
    """The unverified plan in a format that torch lacks; its failure text states the error of a replay."""
    try:
        error = f"gives an error of {model.replay(model.replay_batches, policy_of(model.capture, plan)):.2g}"
    except Exception as refused:
        let_through(refused)
        error = f"ends with: {first_line(refused)}"
    why = f"torch has no arithmetic in {label(plan.format)}, so the plan cannot be run"
    return _record_run(model, plan, failure=f"{why}; replaying the recorded graph with every value rounded {error}")


def judge_answers(model: MeasuredModel, plan: Plan, expected: Answers, answer: Answers | str) -> Plan:
    """The plan with its artefact's outputs compared with FP32's, or with the reason why it returned none.

    An exported program that only raises with gradients enabled is judged without: programs are for inference.
    Raises: torch.OutOfMemoryError if a GPU ran out of memory in that run.
    """
    failure = answer if isinstance(answer, str) else answer.ungraded
    if model.options.native and failure is not None and said_no_memory(failure):
        raise torch.OutOfMemoryError(failure)  # no result about the plan
    if isinstance(answer, str):
        return _record_run(model, plan, failure=answer)
    if answer.ungraded is not None and plan.program is None:
        return _record_run(model, plan, failure=f"with gradients enabled, {answer.ungraded}")
    pairs = [(on_cpu(r), c) for r, c in zip(expected.outputs, answer.outputs, strict=True)]
    graded = list[Pair]()
    if expected.graded is not None and answer.graded is not None:
        graded = [(on_cpu(expected.graded), answer.graded)]
    distance = model.output_metric.distance
    try:
        by_batch = [distance(*pair) for pair in pairs]
        by_graded = [distance(*pair) for pair in graded]
    except MeasureError as refused:
        return _record_run(model, plan, failure=str(refused))
    if graded and (otherwise := _difference_with_gradients(model, plan, pairs[0], graded[0])):
        return _record_run(model, plan, failure=otherwise)
    noise = model.noise.measured
    error = worst_of(by_batch)
    error_with_gradients = worst_of(by_graded)
    is_finite = math.isfinite(error + error_with_gradients)
    scattered = None
    if is_finite and error <= model.max_error:
        scattered = _scattered(model, plan, expected)
    joint = None
    if distance is not output_error:
        joint = _finite_or_none(worst_of([output_error(*pair) for pair in pairs]))
    outliers = measure_outliers(pairs)
    shown_by_batch: tuple[float | None, ...] = ()
    if len(by_batch) > 1:
        shown_by_batch = tuple(map(_finite_or_none, by_batch))
    ungraded_in_fp32 = model.noise.graded if isinstance(model.noise.graded, str) else None
    nonfinite = None
    if not is_finite and plan.program is None:
        nonfinite = locate_nonfinite(model, policy_of(model.capture, plan))
    return _record_run(
        model,
        plan,
        pairs,
        graded,
        measured_error=error if is_finite else None,
        scattered=scattered,
        joint=joint,
        apart=outliers,
        with_gradients=error_with_gradients if graded and is_finite else None,
        by_batch=shown_by_batch,
        noise=noise.error,
        floor=noise.floor if noise.floor > model.output_metric.budget else 0.0,
        ungraded=answer.ungraded or ungraded_in_fp32,
        nonfinite=nonfinite,
    )


def _difference_with_gradients(model: MeasuredModel, plan: Plan, plain: Pair, graded: Pair) -> str:
    """Why the outputs of a run with gradients are others than those of the run without; "" if they are not.

    Two runs of one plan that round differently are about equally far from FP32, up to one epsilon of the format.
    """
    before = output_error(*plain)
    after = output_error(*graded)
    most = 2 * before + FORMATS[plan.format].epsilon + FLOOR * model.noise.measured.joint
    if not math.isfinite(before) or after <= most:
        return ""
    return f"with gradients enabled the outputs differ: error {after:.2g} instead of {before:.2g}"


def _finite_or_none(error: float) -> float | None:
    return error if math.isfinite(error) else None


def _scattered(model: MeasuredModel, plan: Plan, expected: Answers) -> float | None:
    """The error at slightly changed weights, see `scattered_error`, of a model whose outputs have few numbers; None for
    other models, and for programs, whose weights cannot be changed."""
    if plan.program is not None or not are_few(expected.outputs):
        return None
    module, options = model.subject.model, model.options
    load = partial(in_hand, module, {plan.name: plan})
    runs = ModelRuns(load, model.checks, options.where, options.seed, most=model.most)
    try:
        return scattered_error(module, plan, runs, model.output_metric.distance)
    except Exception as error:  # other weights may lead to outputs of other shapes
        let_through(error)
        return None


def _record_run(
    model: MeasuredModel, plan: Plan, pairs: Sequence[Pair] = (), graded: Sequence[Pair] = (), **said: Any
) -> Plan:
    """Add the results of a verification run to a plan.

    pairs, graded: (reference, output) of the runs without and with gradients; the criteria must hold for both.
    """
    distance, inputs = model.output_metric.distance, "held-out" if model.subject.held_out else "audited"
    criteria = distance.values(pairs, graded, plan.predicted_error) if isinstance(distance, Criteria) else ()
    execution = "native" if model.options.native else "emulated"
    ran = Verification(
        inputs=inputs,
        execution=execution,
        batches=len(model.checks),
        allowed=model.max_error,
        criteria=criteria,
        **said,
    )
    holds = ran.worst_error <= model.max_error and all(one.holds for one in criteria)
    return replace(plan, verification=replace(ran, holds=holds))


def judge_replay(model: MeasuredModel, error: float, policy: Policy) -> Verification:
    """Verification of a model in a format that torch lacks, from the error of a replay of the recorded graph."""
    if math.isfinite(error):
        return Verification(error, error <= model.max_error)
    return Verification(None, nonfinite=locate_nonfinite(model, policy))


def locate_nonfinite(model: MeasuredModel, policy: Policy) -> NonFinite | None:
    """Find the operation at which the recorded graph turns non-finite under a policy, on the first batch where it does."""
    twins = model.capture.twins
    for number, batch in enumerate(model.replay_batches, start=1):
        path = path_of(model.capture, model.subject, batch)
        if path is None:
            continue
        first = first_non_finite(path, model.subject.model, batch, policy)
        if first is not None:
            node = twins.get(first.node, first.node)
            begins = twins.get(first.begins, first.begins)
            return replace(first, node=node, begins=begins, batch=number)
    return None


def today_of(model: MeasuredModel) -> Today | None:
    """Error of FP32 under the caller's own flags (such as TF32) against IEEE FP32, on the inputs of the verification;
    None if the flags make no difference beyond FP32's noise."""
    allowed = loose(model.flags, model.options.where)
    may_select_kernels = model.options.native and model.flags.get("cudnn.benchmark")
    if not allowed and not may_select_kernels:
        return None
    try:
        with under(model.flags):
            results = [run_model(model.subject.model, batch, seed=model.options.seed) for batch in model.checks]
        errors = list[float]()
        for batch, result in zip(model.checks, results, strict=True):
            errors.append(model.output_metric.distance(model.reference(batch), result))
        worst = worst_of(errors)
    except Exception as error:
        let_through(error)
        return Today(allowed, None, failure_of(error))
    if worst <= FLOOR * model.noise.measured.error:
        return None
    return Today(allowed, worst if math.isfinite(worst) else None)


def note_gpu_only(model: MeasuredModel, plans: Mapping[str, Plan]) -> dict[str, Plan]:
    """Note plans that run only on a GPU, with the exception that they raise on this CPU without emulation, for example
    since it lacks a low-precision kernel. Only plans that hold are tried, and only small models: native FP16 is slow on
    many CPUs."""
    result = {**plans}
    flops = sum(cost.flops for cost in model.costs.values())
    if model.options.native or flops > MOST_FLOPS:
        return result
    tried = {name: plan for name, plan in plans.items() if runs(plan.format) and plan.has_low and plan.holds}
    if not tried:
        return result
    failures: dict[str, str] = model.ask(tried, partial(ModelRuns.natively, trains=model.options.training))
    for name, failure in failures.items():
        if failure and not says_nothing(failure):
            result[name] = replace(plans[name], gpu_only=failure)
    return result
