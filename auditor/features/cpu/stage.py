"""Asks the CPU which kernels ran, runs plans compiled, and finds the plans that hold on CUDA as well."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from ...errors import let_through
from ...execution.policy import choice_from_scopes
from ...isolation.run_model import run_model
from ...numerics.cpus import cpu_row
from ...numerics.devices import CPU, NATIVE_CPU, on_target
from ...numerics.formats import runs
from ...plan.context import PlanningContext, worst_of
from ...plan.made import MadePlans
from ...plan.plans import as_plan
from ...plan.problem import Problem
from ...plan.verified import verify
from ...records import Plan
from ...records.cpu import CpuRun, CpuTarget, ForBoth
from ...records.paths import FP32_OUTPUT, function_in
from ...settings import Settings
from ...stages import Stages
from ...verify.loaders import in_hand
from ...verify.running import FP32, ModelRuns
from ..feature import Feature, Followed
from .questions import Executed, compiled_outputs, executed


class OnTheCpu(Feature):
    """Notes which kernels a CPU runs, the errors of compiled plans, and the plans that hold on CUDA as well."""

    target: CpuTarget | None = None

    @classmethod
    def wants(cls, options: Settings) -> bool:
        """Whether the CPU is the target."""
        return options.where == NATIVE_CPU

    def after_plans(self, made: MadePlans, planning: PlanningContext, stages: Stages) -> MadePlans:
        """Run FP32 and every plan once more, and note what ran."""
        with stages("kernels", "FP32 and every plan on this CPU"):
            self.target = look_at_cpu(planning, made.plans)
        return made

    def fields(self, followed: Followed) -> dict[str, Any]:
        """The CPU, and what ran on it."""
        return {"cpu": self.target}


FEATURE = OnTheCpu


def look_at_cpu(planning: PlanningContext, plans: Mapping[str, Plan]) -> CpuTarget:
    """The CPU, the kernels of FP32 and of each plan, errors of compiled plans, and plans for CUDA as well."""
    patched = {name: plan for name, plan in plans.items() if runs(plan.format) and plan.program is None}
    names = [FP32, *patched]
    ran: dict[str, Executed | str] = planning.ask(patched, executed, names=names)
    kernels_of = {name: one for name, one in ran.items() if not isinstance(one, str)}
    compiled = dict[str, Sequence[torch.Tensor] | str]()
    holding = [name for name, plan in patched.items() if plan.holds and plan.has_low]
    if holding and planning.options.times:
        compiled = planning.ask(patched, compiled_outputs, names=holding)
    results = {}
    for name in names:
        answer = ran[name]
        kernels, unread = ({}, answer) if isinstance(answer, str) else (answer[1], None)
        error, failure = None, None
        if name in compiled:
            error, failure = _error_or_failure(planning, compiled[name])
        results[name] = CpuRun(kernels, unread, error, failure)
    return CpuTarget(
        capability=torch.backends.cpu.get_cpu_capability(),
        isa=next((isa for isa, _ in kernels_of.values() if isa), ""),
        row=cpu_row(),
        threads=torch.get_num_threads(),
        runs=results,
        for_both=tuple(_for_both(planning, plans)),
    )


def _error_or_failure(
    planning: PlanningContext, answer: Sequence[torch.Tensor] | str
) -> tuple[float | None, str | None]:
    """The error of a compiled model's outputs against FP32, or the reason why there is none."""
    if isinstance(answer, str):
        return None, answer
    try:
        error = planning.output_metric.distance(planning.reference(planning.checks[0]), answer)
    except Exception as refused:  # the user's metric may raise anything
        let_through(refused)
        return None, str(refused)
    if not math.isfinite(error):
        return None, "an output contains Inf or NaN where FP32 is finite"
    return error, None


def _for_both(planning: PlanningContext, plans: Mapping[str, Plan]) -> Sequence[ForBoth]:
    """For each plan that was also made for CUDA: what the targets keep in FP32, and a plan that keeps both's."""
    for_cuda: Mapping[str, Plan] = planning.options.for_cuda or {}
    result = []
    for name, ours in plans.items():
        theirs = for_cuda.get(name)
        if theirs is not None and runs(ours.format) and ours.program is None:
            result.append(_joined(planning, ours, theirs))
    return result


def _joined(planning: PlanningContext, ours: Plan, theirs: Plan) -> ForBoth:
    """One strategy and format on both targets. ours: the plan for the CPU; theirs: the plan for CUDA."""
    problem = planning.problem(ours.strategy, ours.format)
    on_cpu, on_cuda = _in_fp32(problem, ours), _in_fp32(problem, theirs)
    error_on_cpu, error_on_cuda = ours.measured_error, theirs.measured_error
    if on_cpu != on_cuda:
        both = as_plan(problem, problem.evaluate(on_cpu | on_cuda))
        subject = planning.subject
        both = replace(both, upcast=subject.upcast, stored_low=subject.stored_low)
        error_on_cpu = verify(planning, {both.name: both})[both.name].measured_error
        error_on_cuda = _error_on_cuda(planning, both)
    most = planning.max_error
    errors = (error_on_cpu, error_on_cuda)
    return ForBoth(
        plan=ours.name,
        cpu=tuple(sorted(on_cpu)),
        cuda=tuple(sorted(on_cuda)),
        error_of_cpu=ours.measured_error,
        error_of_cuda=theirs.measured_error,
        error_on_cpu=error_on_cpu,
        error_on_cuda=error_on_cuda,
        holds=all(error is not None and error <= most for error in errors),
    )


def _in_fp32(problem: Problem, plan: Plan) -> frozenset[str]:
    """Paths of the modules and functions that a plan keeps in FP32."""
    choice = choice_from_scopes(plan.scopes)
    outputs = {
        function_in(path, f"{name}{FP32_OUTPUT}") for path, each in plan.scopes.items() for name in each.fp32_output
    }
    return frozenset(path for path in problem.energy.scopes if choice(path) == "fp32") | outputs


def _error_on_cuda(planning: PlanningContext, plan: Plan) -> float | None:
    """The worst error of a plan on the emulated GPU, in this process; None if it fails there, or is not finite."""
    model, seed = planning.subject.model, planning.options.seed
    with on_target(CPU):
        load = partial(in_hand, model, {plan.name: plan})
        answer = ModelRuns(load, planning.checks, CPU, seed, most=planning.most).answers(plan.name)
        if isinstance(answer, str):
            return None
        references = [run_model(model, batch, seed=seed) for batch in planning.checks]
    pairs = zip(references, answer.outputs, strict=True)
    worst = worst_of([planning.output_metric.distance(*pair) for pair in pairs])
    return worst if math.isfinite(worst) else None
