"""Runs plans as the artefact that a user gets, compares them with FP32, and locates the operation that breaks them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from ..artefact.strategies import strategy_of
from ..capture.paths import path_of
from ..criteria.criterion import FLOOR
from ..criteria.defaults import measure_outliers
from ..criteria.measure import Criteria
from ..errors import MeasureError, first_line, let_through
from ..execution.beside import first_non_finite, policy_of
from ..execution.policy import Policy
from ..isolation.answer import answer
from ..isolation.outputs import on_cpu
from ..isolation.process import loose, under
from ..numerics.devices import name_of
from ..numerics.entries import tensors_in
from ..numerics.formats import FORMATS, label, runs
from ..numerics.metrics import output_error
from ..records import NonFinite, Plan, ScopeChoice, TimeAndMemory, Timing, Today, Verdict, Verification
from ..records.decisions import Decision, Decisions
from ..records.measure import MEASURED
from ..records.plan import INPUT
from ..rulebook.verdicts import Judgement
from ..stages import tick
from ..verify.loaders import in_hand
from ..verify.running import FP32, TODAY, Answers, Runs, compare_times, failure_of, said_no_memory, says_nothing
from .scatter import are_few, scattered_error
from .workbench import Workbench, worst_of

Pair = tuple[list[torch.Tensor], list[torch.Tensor]]
"""Outputs of the model in FP32, and of the patched model, on one batch."""


MOST_FLOPS = 10_000_000_000
"""FLOPs of a forward up to which `note_gpu_only` runs it: seconds, where a CPU emulates FP16 in software."""


def verify(bench: Workbench, plans: Mapping[str, Plan], files: Mapping[str, bytes] | None = None) -> dict[str, Plan]:
    """The plans with the results of running their artefacts: errors against FP32, and whether they meet the budget.

    If torch cannot compute in a plan's format, the plan has no artefact and remains unverified, with that reason.
    files: contents of exported programs, by file name.
    """
    run = {name: plan for name, plan in plans.items() if runs(plan.format)}
    result = {name: _unrunnable(bench, plan) for name, plan in plans.items() if name not in run}
    if run:
        tick("running the patched model" if files is None else "running the programs")
        expected = Answers([bench.reference(batch) for batch in bench.checks], bench.graded_outputs)
        given = bench.ask(run, Runs.answers, files)
        result |= {name: judge_answers(bench, plan, expected, given[name]) for name, plan in run.items()}
    return {name: result[name] for name in plans}


def _unrunnable(bench: Workbench, plan: Plan) -> Plan:
    """The unverified plan in a format that torch lacks; its failure text states the error of a replay."""
    try:
        error = f"gives an error of {bench.replay(bench.replay_batches, policy_of(bench.capture, plan)):.2g}"
    except Exception as refused:
        let_through(refused)
        error = f"ends with: {first_line(refused)}"
    why = f"torch has no arithmetic in {label(plan.format)}, so the plan cannot be run"
    return _record_run(bench, plan, failure=f"{why}; replaying the recorded graph with every value rounded {error}")


def judge_answers(bench: Workbench, plan: Plan, expected: Answers, answer: Answers | str) -> Plan:
    """The plan with its artefact's outputs compared with FP32's, or with the reason why it returned none.

    Raises: torch.OutOfMemoryError if a GPU ran out of memory in that run.
    """
    if isinstance(answer, str):
        if bench.options.native and said_no_memory(answer):
            raise torch.OutOfMemoryError(answer)  # no result about the plan
        return _record_run(bench, plan, failure=answer)
    distance, noise = bench.yardstick.distance, bench.noise.found
    pairs, graded = [(on_cpu(r), c) for r, c in zip(expected.outputs, answer.outputs, strict=True)], list[Pair]()
    if expected.graded is not None and answer.graded is not None:
        graded = [(on_cpu(expected.graded), answer.graded)]
    try:
        error, enabled = (worst_of([distance(*pair) for pair in some]) for some in (pairs, graded))
    except MeasureError as refused:
        return _record_run(bench, plan, failure=str(refused))
    if graded:
        # Two runs of one plan that round differently are about equally far from FP32, up to one epsilon of the format.
        before, after = output_error(*pairs[0]), output_error(*graded[0])
        expected_most = 2 * before + FORMATS[plan.format].epsilon + FLOOR * noise.joint
        if math.isfinite(before) and not after <= expected_most:
            otherwise = f"with gradients enabled the outputs differ: error {after:.2g} instead of {before:.2g}"
            return _record_run(bench, plan, failure=otherwise)
    is_finite = math.isfinite(error + enabled)
    scattered = _scattered(bench, plan, expected) if is_finite and error <= bench.max_error else None
    error = max(error, scattered or 0.0)
    joint = math.inf if distance is output_error else worst_of([output_error(*pair) for pair in pairs])
    return _record_run(
        bench,
        plan,
        pairs,
        graded,
        measured_error=error if is_finite else None,
        scattered=scattered,
        joint=joint if math.isfinite(joint) else None,
        apart=measure_outliers(pairs),
        with_gradients=enabled if graded and is_finite else None,
        noise=noise.error,
        floor=noise.floor if noise.floor > bench.yardstick.budget else 0.0,
        ungraded=bench.noise.graded if isinstance(bench.noise.graded, str) else None,
        nonfinite=None if is_finite or plan.program else locate_nonfinite(bench, policy_of(bench.capture, plan)),
    )


def _scattered(bench: Workbench, plan: Plan, expected: Answers) -> float | None:
    """The error of outputs of few numbers at slightly changed weights, see `scattered_error`; None for others, and for
    programs, which hold their weights."""
    if plan.program is not None or not are_few(expected.outputs):
        return None
    model, options = bench.subject.model, bench.options
    runs = Runs(partial(in_hand, model, {plan.name: plan}), bench.checks, options.where, options.seed, most=bench.most)
    try:
        return scattered_error(model, plan, runs, bench.yardstick.distance)
    except Exception as error:  # other weights may lead to outputs of other shapes
        let_through(error)
        return None


def _record_run(
    bench: Workbench, plan: Plan, pairs: Sequence[Pair] = (), graded: Sequence[Pair] = (), **said: Any
) -> Plan:
    """The plan with the results of a run. pairs, graded: outputs without and with gradients; criteria must hold for
    both."""
    distance, inputs = bench.yardstick.distance, "held-out" if bench.subject.held_out else "audited"
    criteria = distance.values(pairs, graded, plan.predicted_error) if isinstance(distance, Criteria) else ()
    execution = "native" if bench.options.native else "emulated"
    ran = Verification(
        inputs=inputs,
        execution=execution,
        batches=len(bench.checks),
        allowed=bench.max_error,
        criteria=criteria,
        **said,
    )
    worst = math.inf if ran.measured_error is None else max(ran.measured_error, ran.with_gradients or 0.0)
    holds = worst <= bench.max_error and all(one.holds for one in criteria)
    return replace(plan, verification=replace(ran, holds=holds))


def judge_replay(bench: Workbench, error: float, policy: Policy) -> Verification:
    """Verification of a model in a format that torch lacks, from the error of a replay of the recorded graph."""
    if math.isfinite(error):
        return Verification(error, error <= bench.max_error)
    return Verification(None, nonfinite=locate_nonfinite(bench, policy))


def locate_nonfinite(bench: Workbench, policy: Policy) -> NonFinite | None:
    """Find the operation at which the recorded graph turns non-finite under a policy, on the first batch where it does.
    The result names the rules with findings at this operation or at the cause."""
    batches, twins = bench.replay_batches, bench.capture.twins
    for number, batch in enumerate(batches, start=1):
        path = path_of(bench.capture, bench.subject, batch)
        first = first_non_finite(path, bench.subject.model, batch, policy) if path is not None else None
        if first is not None:
            begins, node = (twins.get(name, name) for name in (first.begins, first.node))
            spoken = [(twins.get(f.node, f.node), f.rule) for f in bench.findings if policy.format in f.formats]
            fired = [rule for where in (begins, node) for at, rule in spoken if at == where]
            of_input = [rule for at, rule in spoken if at == begins] if first.begins_op == INPUT else []
            fired = of_input or fired
            rules = dict.fromkeys([rule for rule in fired if rule not in MEASURED] or fired)
            return replace(first, node=node, begins=begins, batch=number, rules=tuple(rules))
    return None


def mark_unsafe(judged: Judgement, baselines: Mapping[str, Verification]) -> Judgement:
    """Mark operations unsafe that first return Inf or NaN when everything is in low precision; without such operations,
    return the same Judgement."""
    found = dict[tuple[str, str], Verdict]()
    for name, base in baselines.items():
        first, (strategy, _, fmt) = base.nonfinite, name.partition("_")
        if first is not None:
            limit = "range" if first.cause in ("overflow", "underflow") else "precision"
            at = f" at {first.begins} ({first.begins_source or first.begins_op})" * (first.begins != first.node)
            cause = f"{first.cause}{at}{f' (batch {first.batch})' if first.batch > 1 else ''}"
            how = f"{label(fmt)} {strategy_of(strategy).title}"
            why = f"its result contains {first.value} in {how}, though finite if run alone; the cause is {cause}"
            found.setdefault((first.node, fmt), Verdict("unsafe", why, limit, first.batch))
    return judged.with_unsafe(found)


def failed_runs(baselines: Mapping[str, Verification]) -> dict[tuple[str, str], str]:
    """{(strategy, format): message} of the runs with everything in low precision that raised an error of the model."""
    result = dict[tuple[str, str], str]()
    for name, base in baselines.items():
        strategy, _, fmt = name.partition("_")
        if base.failure and runs(fmt) and not says_nothing(base.failure):
            result[strategy, fmt] = base.failure
    return result


def today_of(bench: Workbench) -> Today | None:
    """Error of FP32 under the caller's own flags (such as TF32) against IEEE FP32, on the inputs of the verification;
    None if the flags make no difference beyond FP32's noise."""
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
        return Today(allowed, None, failure_of(error))
    return None if worst <= FLOOR * bench.noise.found.error else Today(allowed, worst if math.isfinite(worst) else None)


def run_held_choices(bench: Workbench) -> Iterator[Decisions]:
    """Yield for each format the error with everything in low precision, and of a replay with the FP32 run's decisions.
    These decisions set shapes, such as the number of rows of an expert, and are fixed in the recorded graph; so only
    runs of the model itself show the error of flipped decisions. Only the last requested strategy is run."""
    subject, options, batch = bench.subject, bench.options, bench.subject.batches[0]
    path, reference = bench.capture.first, bench.reference(batch)
    constants = {p.name for p in path.placeholders if p.kind == "constant" and p.name.startswith("held")}
    readers = (node for node in path.nodes.values() if constants & set(node.inputs))
    each = {(n.op, n.owner, n.source): Decision(n.name, n.op, n.owner, n.source, 0, None, None, None) for n in readers}
    for strategy in options.scope_strategies[-1:] if each else ():
        for fmt in filter(runs, options.formats):
            plan = Plan(f"{strategy}_{fmt}", strategy, fmt, {"": ScopeChoice(fmt)})
            plan = replace(plan, raised=subject.raised, stored_low=subject.stored_low)
            load = partial(in_hand, subject.model, {plan.name: plan})
            ran = Runs(load, [batch], options.where, options.seed, most=bench.most).answers(plan.name)
            try:
                error = math.inf if isinstance(ran, str) else bench.yardstick.distance(reference, ran.outputs[0])
                if math.isfinite(error):
                    replayed = bench.replay([batch], policy_of(bench.capture, plan))
                    yield Decisions(fmt, error, replayed, tuple(each.values()))
            except Exception as failure:  # an operation does not support the format, or output shapes differ
                let_through(failure)


def note_gpu_only(bench: Workbench, plans: Mapping[str, Plan]) -> dict[str, Plan]:
    """The plans, with the exception of a plan's model where this CPU, without emulation, cannot run it: a CPU lacks some
    kernels of low precision. Only plans that hold are tried, and only small models: native FP16 is slow on many CPUs."""
    flops = sum(cost.flops for cost in bench.costs.values())
    if bench.options.native or flops > MOST_FLOPS:
        return {**plans}
    tried = {name: plan for name, plan in plans.items() if runs(plan.format) and plan.has_low and plan.holds}
    said: dict[str, str] = bench.ask(tried, Runs.natively) if tried else {}
    return {
        name: replace(plan, gpu_only=why) if (why := said.get(name)) and not says_nothing(why) else plan
        for name, plan in plans.items()
    }


def timed_plans(bench: Workbench, plans: Mapping[str, Plan]) -> tuple[dict[str, Plan], Timing]:
    """The plans with time and memory of one forward, and the FP32 results that these are compared with.

    On a GPU the plans run natively. On a CPU the plans run in the CPU's half precision, without emulation, and the
    times say nothing about a GPU. FP32 operations, also those in plans, compute in IEEE arithmetic.
    """
    today = bool(loose(bench.flags, bench.options.where))
    run = {name: plan for name, plan in plans.items() if runs(plan.format) and plan.program is None}
    names = [FP32, *([TODAY] if today else []), *run]
    question = partial(Runs.time, flags=dict(bench.flags), threads=torch.get_num_threads())
    given: dict[str, TimeAndMemory | str] = bench.ask(run, question, names=names)
    lacking = ("eager", "compiled", "memory")
    found = {
        name: TimeAndMemory(missing=dict.fromkeys(lacking, one)) if isinstance(one, str) else one
        for name, one in given.items()
    }
    whole = found.pop(FP32)
    result = {name: compare_times(one, whole) for name, one in found.items()}
    timing = Timing(
        device=name_of(bench.options.where),
        batch=next((x.shape[0] for x in tensors_in(bench.checks[0]) if x.dim() and not x.is_nested), None),
        threads=torch.get_num_threads(),
        fp32=whole,
        fp32_today=result.get(TODAY),
    )
    timed = {name: replace(result[name], decides=bench.options.native) for name in run}
    return {name: replace(plan, timed=timed.get(name)) for name, plan in plans.items()}, timing
