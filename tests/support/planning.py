"""What plans are made from, for a model in hand, and a search long enough to say what the best plan is."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from auditor.capture.capture import capture
from auditor.measure.calibrate import calibrate
from auditor.measure.noise import FP32Runs
from auditor.measure.rerun import OutputMetric
from auditor.plan.all_low import run_all_low
from auditor.plan.context import MeasuredModel, PlanningContext
from auditor.plan.modules import Modules, as_candidate, lowered_with
from auditor.plan.plans import Planner, as_plan
from auditor.plan.problem import Problem
from auditor.plan.search import Candidate
from auditor.plan.verified import verify
from auditor.records import Plan
from auditor.rulebook.findings import classify, compare_with_verdicts
from auditor.rulebook.gather import gather
from auditor.rulebook.verdicts import judge
from auditor.settings import Settings
from tests.support.subjects import subject_of


class Foretold(Modules):
    """Choices whose replays err by `off` times as predicted, beyond `refused` do not run, and are listed in `asked`."""

    def __init__(
        self,
        problem: Problem,
        budget: float,
        off: float = 1.0,
        refused: float = math.inf,
        known: Sequence[tuple[Candidate, float]] = (),
    ) -> None:
        super().__init__(problem, None, budget)  # type: ignore[arg-type]
        self.off, self.refused, self.asked = off, refused, list[Candidate]()
        self.log |= {point.high: error for point, error in known}

    def replay(self, point: Candidate) -> float:
        self.asked.append(point)
        return self.off * point.predicted_error if point.predicted_error <= self.refused else math.inf


def planning_of(
    model: nn.Module, *inputs: Any, formats: Sequence[str] = ("fp16", "bf16"), **asked: Any
) -> PlanningContext:
    """The stages of an audit before its plans. asked: fields of Settings."""
    options = Settings(command="here", formats=tuple(formats), **asked)
    subject = subject_of(model, *inputs)
    captured = capture(subject, options.formats)
    measured = calibrate(captured, subject, options.formats, options.seed)
    judged = judge(captured, measured, options.formats, options.max_error)
    facts = gather(captured, measured.ranges, judged.verdicts)
    findings = compare_with_verdicts(classify(captured, facts, options.rulebook), judged.verdicts)
    output_metric = OutputMetric(options.max_error)
    model = MeasuredModel(subject, captured, measured, options, output_metric, FP32Runs())
    return PlanningContext.of(model, judged, findings)


def planner_of(planning: PlanningContext) -> Planner:
    """The planner of a context, after its runs with everything in low precision."""
    return Planner(planning, run_all_low(planning).runs)


def lowered(planning: PlanningContext, problem: Problem, plan: Plan, modules: Sequence[str]) -> Plan:
    """A plan with further modules low, patched into the model and run as on a GPU; all other modules stay as they are."""
    chosen = as_candidate(problem, plan)
    together = {other for path in modules for other in lowered_with(problem, path)}
    return kept(planning, problem, plan, sorted(chosen.high - together))


def kept(planning: PlanningContext, problem: Problem, plan: Plan, modules: Sequence[str]) -> Plan:
    """The plan with exactly these modules in FP32, patched into the model and run as on a GPU."""
    scopes = as_plan(problem, problem.evaluate(modules)).scopes
    changed = replace(plan, scopes=scopes, verification=None)
    return verify(planning, {plan.name: changed})[plan.name]
