"""What a feature does during an audit: the hooks that an audit calls."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..execution.beside import UnderPlan
from ..plan.context import MeasuredModel, PlanningContext, Scorer
from ..plan.made import MadePlans
from ..records import Plan, Subject, Verdict
from ..rulebook.compiled import Recomputed
from ..settings import Settings
from ..stages import Stages
from . import parts


@dataclass(frozen=True)
class Evidence:
    """What features measured for the verdicts and findings, beside the errors of operations in the forward pass.

    unsafe: {(operation, format): the verdict `unsafe` on it}. changed_by_compiler: the operations whose gradients
    torch.compile may turn NaN; None if no feature measured gradients.
    """

    unsafe: Mapping[tuple[str, str], Verdict] = field(default_factory=dict)
    changed_by_compiler: Recomputed | None = None


@dataclass(frozen=True)
class Followed:
    """The recommended plan, None for FP32, and what a replay of the recorded graph under this plan gave."""

    planning: PlanningContext
    plan: Plan | None
    replay: UnderPlan
    stages: Stages


class Feature:
    """One capability during one audit. A subclass overrides the methods that it needs; the others do nothing.

    The methods are called in the order in which they stand here.
    """

    @classmethod
    def wants(cls, options: Settings) -> bool:
        """Whether the audit asks for this feature."""
        return True

    def prepare(self, subject: Subject, options: Settings, stages: Stages) -> tuple[Subject, Settings]:
        """Run the model in FP32 before it is recorded. The audit continues with the subject and the options returned."""
        return subject, options

    def before_verdicts(self, evidence: Evidence, model: MeasuredModel, stages: Stages) -> Evidence:
        """Measure more of the recorded model before its operations are judged. The evidence returned adds to the given."""
        return evidence

    @property
    def scorer(self) -> Scorer | None:
        """The scorer that accepts or refuses plans in addition to the error budget; None if the feature has none."""
        return None

    def after_plans(self, made: MadePlans, planning: PlanningContext, stages: Stages) -> MadePlans:
        """Make further plans, or measure the plans made so far."""
        return made

    def recommend(self, made: MadePlans, planning: PlanningContext) -> tuple[str | None, str] | None:
        """Choose the plan to use: its name, None for FP32, and the reason in words. The first feature with an answer
        decides; without one, the plans' errors and gains do."""
        return None

    def fields(self, followed: Followed) -> dict[str, Any]:
        """Fields of the Audit that the feature fills, by name."""
        return {}


def wanted(options: Settings) -> list[Feature]:
    """The features that an audit asks for, for use in this audit alone."""
    classes: list[type[Feature]] = [stage.FEATURE for _, stage in parts("stage")]
    return [feature() for feature in classes if feature.wants(options)]
