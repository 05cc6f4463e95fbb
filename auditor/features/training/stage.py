"""The stages of a training audit: backward passes before verdicts, steps in low precision after plans."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from ...numerics.formats import label
from ...plan.context import MeasuredModel, PlanningContext
from ...plan.made import MadePlans
from ...plan.recommend import best_for
from ...records import Subject
from ...records.training import Training
from ...rulebook.verdicts import unsafe_backward
from ...settings import Settings
from ...stages import Stages
from ..feature import Evidence, Feature, Followed
from .measure import MeasuredStep, conclude, prepare
from .recommend import choose_plan


class TrainingAudit(Feature):
    """Runs the training step in FP32 and under the plans, and recommends how to train."""

    _step: MeasuredStep
    _training: Training

    @classmethod
    def wants(cls, options: Settings) -> bool:
        """Whether a training step is audited."""
        return options.training

    def before_verdicts(self, evidence: Evidence, model: MeasuredModel, stages: Stages) -> Evidence:
        """Run the FP32 step, with the backward pass of each operation in low precision."""
        options = model.options
        with stages("training", "run the training step in FP32"):
            step = prepare(model.subject, options.formats, options.seed)
            unsafe = unsafe_backward(model.capture, step.nodes, step.capture)
            changed = step.changed_by_compiler(model.capture)
        self._step = step
        return Evidence({**evidence.unsafe, **unsafe}, changed)

    def after_plans(self, made: MadePlans, planning: PlanningContext, stages: Stages) -> MadePlans:
        """Run the step under the plans, and choose the format to train in. The plans stay as they are."""
        options = planning.options
        formats = " and ".join(map(label, options.formats))
        with stages("low-precision steps", f"run the training step in {formats}"):
            self._training = conclude(self._step, made.plans, best_for(made.plans, options.use))
        warnings = _unmeasured_batches(self._training, planning.subject)
        return replace(made, warnings=(*made.warnings, *warnings))

    def recommend(self, made: MadePlans, planning: PlanningContext) -> tuple[str | None, str]:
        """The plan to train under, if the audit recommends plans for training; see `choose_plan`."""
        budget = planning.output_metric.budget
        return choose_plan(made.plans, budget, planning.options.use, self._training, made.baselines)

    def fields(self, followed: Followed) -> dict[str, Any]:
        """The results of the training step."""
        return {"training": self._training}


FEATURE = TrainingAudit


def _unmeasured_batches(training: Training, subject: Subject) -> Iterator[str]:
    """A warning about batches whose gradients were not measured, if there are any."""
    if training.batches != len(subject.batches):
        yield (
            f"Gradients were measured on {training.batches} of {len(subject.batches)} batches, "
            "since the other batches have other shapes or operations in the training step."
        )
