"""The stage of exported programs: plans for exported graphs, beside the plans for modules."""

from __future__ import annotations

from dataclasses import replace

from ...artefact.strategies import GRAPHS
from ...plan.context import PlanningContext
from ...plan.made import MadePlans
from ...settings import Settings
from ...stages import Stages
from ..feature import Feature
from .graphs import graphs_of


class Programs(Feature):
    """Exports the model, and makes and verifies a plan for every format."""

    @classmethod
    def wants(cls, options: Settings) -> bool:
        """Whether a strategy of programs is asked for."""
        return not {*GRAPHS}.isdisjoint(options.strategies)

    def after_plans(self, made: MadePlans, planning: PlanningContext, stages: Stages) -> MadePlans:
        """The plans, with those of programs."""
        with stages("graph", "export, solve, verify"):
            graphs = graphs_of(planning)
        return replace(
            made,
            plans={**made.plans, **graphs.plans},
            baselines={**made.baselines, **graphs.baselines},
            programs={**made.programs, **graphs.programs},
            warnings=(*made.warnings, *graphs.warnings),
        )


FEATURE = Programs
