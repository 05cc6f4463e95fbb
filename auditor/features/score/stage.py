"""The stage of scores: the user's score of the FP32 model, then of every verified plan."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ...capture.places import portable
from ...plan.context import PlanningContext
from ...plan.made import MadePlans
from ...records import Subject
from ...settings import Settings
from ...stages import Stages
from ..feature import Feature, Followed
from .scores import InFp32, in_fp32


class UserScore(Feature):
    """Scores FP32 before the audit, and every verified plan after it."""

    _in_fp32: InFp32

    @classmethod
    def wants(cls, options: Settings) -> bool:
        """Whether the user gave a scoring function."""
        return options.scoring is not None

    def prepare(self, subject: Subject, options: Settings, stages: Stages) -> tuple[Subject, Settings]:
        """Score the FP32 model."""
        assert options.scoring is not None
        with stages("FP32 score", options.scoring.name):
            self._in_fp32 = in_fp32(subject, options, options.scoring)
        return subject, options

    @property
    def scorer(self) -> InFp32:
        """The user's function, with the score of the FP32 model."""
        return self._in_fp32

    def after_plans(self, made: MadePlans, planning: PlanningContext, stages: Stages) -> MadePlans:
        """The plans with their scores: of patched models, then of saved programs."""
        patched = {name: plan for name, plan in made.plans.items() if plan.program is None}
        programs = {name: plan for name, plan in made.plans.items() if plan.program is not None}
        with stages("scores", self._in_fp32.scoring.name):
            scored = self._in_fp32.under(patched, planning)
            scored |= self._in_fp32.under(programs, planning, made.programs)
        return replace(made, plans={name: scored[name] for name in made.plans})

    def fields(self, followed: Followed) -> dict[str, Any]:
        """The score of the FP32 model."""
        evaluation = self._in_fp32.evaluation
        return {"evaluation": replace(evaluation, function=portable(evaluation.function))}


FEATURE = UserScore
