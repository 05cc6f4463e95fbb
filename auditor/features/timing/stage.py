"""Measures time and memory of the model in FP32 and under every plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import Any

import torch

from ...isolation.process import loose
from ...numerics.devices import CPU, NATIVE_CPU, is_gpu, name_of
from ...numerics.entries import tensors_in
from ...numerics.formats import runs
from ...plan.context import MeasuredModel, PlanningContext
from ...plan.made import MadePlans
from ...records import Plan, TimeAndMemory, Timing
from ...settings import Settings
from ...stages import Stages
from ...verify.running import FP32, TODAY, ModelRuns, compare_times
from ..feature import Feature


class TimePlans(Feature):
    """Times FP32 and every plan, repeatedly."""

    @classmethod
    def wants(cls, options: Settings) -> bool:
        """Whether times are asked for, or can be measured on the device at hand."""
        return options.times

    def after_plans(self, made: MadePlans, planning: PlanningContext, stages: Stages) -> MadePlans:
        """The plans with their times, and the conditions of the measurement."""
        with stages("times", "FP32 and every plan, repeatedly"):
            plans, timing = timed_plans(planning, made.plans)
        return replace(made, plans=plans, timing=timing)


FEATURE = TimePlans

FURTHER_ROUNDS = 2
"""How often a CPU repeats the times of FP32 and of all plans, since other programs use it as well."""


def timed_plans(model: MeasuredModel, plans: Mapping[str, Plan]) -> tuple[dict[str, Plan], Timing]:
    """The plans with time and memory of one forward, and the FP32 results that these are compared with.

    On a GPU, and on a CPU as the target, the plans run natively, and the times decide. On a CPU that emulates a GPU the
    plans run in the CPU's half precision, without emulation, and the times say nothing about a GPU. FP32 operations, also
    those in plans, compute in IEEE arithmetic.
    """
    timeable = {name: plan for name, plan in plans.items() if runs(plan.format) and plan.program is None}
    where = model.options.where
    names = [FP32]
    if loose(model.flags, where):
        names.append(TODAY)
    names += timeable
    question = partial(ModelRuns.time, flags=dict(model.flags), threads=torch.get_num_threads())
    answers: dict[str, TimeAndMemory | str] = model.ask(timeable, question, names=names)
    if where == NATIVE_CPU:
        for _ in range(FURTHER_ROUNDS):
            again = model.ask(timeable, partial(question, only_eager=True), names=names)
            answers = {name: _faster(answer, again[name]) for name, answer in answers.items()}
    measured = {name: _measurement(answer) for name, answer in answers.items()}
    whole = measured.pop(FP32)
    compared = {name: compare_times(one, whole) for name, one in measured.items()}
    timing = Timing(
        device=name_of(where) if is_gpu(where) else CPU,
        batch=_length_of_batch(model.checks[0]),
        threads=torch.get_num_threads(),
        fp32=whole,
        fp32_today=compared.get(TODAY),
    )
    result = dict[str, Plan]()
    for name, plan in plans.items():
        timed = None
        if name in timeable:
            timed = replace(compared[name], decides=model.options.native)
        result[name] = replace(plan, timed=timed)
    return result, timing


def _measurement(answer: TimeAndMemory | str) -> TimeAndMemory:
    """A measurement; for a message that says why there is none, one without numbers."""
    if not isinstance(answer, str):
        return answer
    return TimeAndMemory(missing=dict.fromkeys(("eager", "compiled", "memory"), answer))


def _length_of_batch(batch: Any) -> int | None:
    """The first size of the first tensor that has one."""
    for x in tensors_in(batch):
        if x.dim() and not x.is_nested:
            return x.shape[0]
    return None


def _faster(one: TimeAndMemory | str, again: TimeAndMemory | str) -> TimeAndMemory | str:
    """The first round's measurements with the smaller eager times of two rounds."""
    if isinstance(one, str) or isinstance(again, str) or one.eager is None or again.eager is None:
        return one
    return replace(one, eager=min(one.eager, again.eager, key=attrgetter("median")))
