"""Runs the whole model in low precision, without a plan: evidence for verdicts, and the baselines of all plans."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from ..criteria.measure import Criteria
from ..errors import first_line, let_through
from ..execution.beside import policy_of
from ..numerics.formats import runs
from ..records import Plan, ScopeChoice, Verification
from ..records.decisions import Decision, Decisions
from ..verify.loaders import in_hand
from ..verify.running import ModelRuns, says_nothing
from .context import MeasuredModel
from .verified import judge_replay, verify


@dataclass(frozen=True)
class AllLow:
    """Results of running the model with everything in low precision, under every requested strategy and format.

    runs: {name of the plan that keeps nothing in FP32: its run}. decisions: see `compare_fixed_decisions`.
    """

    runs: Mapping[str, Verification]
    decisions: tuple[Decisions, ...] = ()

    @property
    def failed(self) -> dict[tuple[str, str], str]:
        """{(strategy, format): message} of the runs that raised an error of the model."""
        result = dict[tuple[str, str], str]()
        for name, run in self.runs.items():
            strategy, _, fmt = name.partition("_")
            if run.failure and runs(fmt) and not says_nothing(run.failure):
                result[strategy, fmt] = run.failure
        return result


def run_all_low(model: MeasuredModel) -> AllLow:
    """Run the model under plain autocast and a plain cast, in every format.

    If torch cannot compute in a format, the recorded graph is replayed instead.
    """
    options = model.options
    plans = [plan_all_low(model, strategy, fmt) for strategy in options.scope_strategies for fmt in options.formats]
    ran = verify(model, {plan.name: plan for plan in plans if runs(plan.format)})
    result = dict[str, Verification]()
    for plan in plans:
        verification = ran[plan.name].verification if plan.name in ran else None
        result[plan.name] = verification or _replay(model, plan)
    return AllLow(result, tuple(compare_fixed_decisions(model)))


def plan_all_low(model: MeasuredModel, strategy: str, fmt: str) -> Plan:
    """The plan that keeps nothing in FP32, without predicted times.

    Its error is predicted only if criteria need it, for the number of decisions that are expected to flip.
    """
    predicted = math.nan
    if isinstance(model.output_metric.distance, Criteria):
        predicted = model.unjudged_problem(strategy, fmt).evaluate(()).predicted_error
    return Plan(
        name=f"{strategy}_{fmt}",
        strategy=strategy,
        format=fmt,
        scopes={"": ScopeChoice(fmt)},
        predicted_error=predicted,
        upcast=model.subject.upcast,
        stored_low=model.subject.stored_low,
    )


def _replay(model: MeasuredModel, plan: Plan) -> Verification:
    """The result of replaying the recorded graph under a plan that torch cannot run."""
    policy = policy_of(model.capture, plan)
    try:
        error = model.replay(model.subject.batches, policy)
    except Exception as refused:
        let_through(refused)
        return Verification(None, failure=first_line(refused))
    return judge_replay(model, error, policy)


def compare_fixed_decisions(model: MeasuredModel) -> Iterator[Decisions]:
    """Yield for each format the error with everything in low precision, and of a replay with the FP32 run's decisions.

    These decisions set shapes, such as the number of rows of an expert, and are fixed in the recorded graph; so only
    runs of the model itself show the error of flipped decisions. Only the last requested strategy is run.
    """
    decisions = _fixed_decisions(model)
    strategies = model.options.scope_strategies
    if not decisions or not strategies:
        return
    batch = model.subject.batches[0]
    for fmt in filter(runs, model.options.formats):
        plan = plan_all_low(model, strategies[-1], fmt)
        try:
            error = _error_here(model, plan)
            if not math.isfinite(error):
                continue
            replayed = model.replay([batch], policy_of(model.capture, plan))
        except Exception as failure:  # an operation does not support the format, or output shapes differ
            let_through(failure)
            continue
        yield Decisions(fmt, error, replayed, decisions)


def _fixed_decisions(model: MeasuredModel) -> tuple[Decision, ...]:
    """The operations that read decisions of the FP32 run as constants of the recorded graph, one for each source line."""
    path = model.capture.first
    constant_names = {
        place.name for place in path.placeholders if place.kind == "constant" and place.name.startswith("held")
    }
    result = dict[tuple[str, str, str | None], Decision]()
    for node in path.nodes.values():
        if constant_names & set(node.inputs):
            result[node.op, node.owner, node.source] = Decision(
                node.name, node.op, node.owner, node.source, 0, None, None, None
            )
    return tuple(result.values())


def _error_here(model: MeasuredModel, plan: Plan) -> float:
    """Error of the patched model on the first batch, run in this process; inf if it raises."""
    options, batch = model.options, model.subject.batches[0]
    load = partial(in_hand, model.subject.model, {plan.name: plan})
    ran = ModelRuns(load, [batch], options.where, options.seed, most=model.most).answers(plan.name)
    if isinstance(ran, str):
        return math.inf
    return model.output_metric.distance(model.reference(batch), ran.outputs[0])
