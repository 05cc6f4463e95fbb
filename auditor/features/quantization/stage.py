"""The stage of quantization schemes: plans below 16 bits, and their code in each library."""

from __future__ import annotations

from dataclasses import replace

from ...document.live import fields_of
from ...plan.context import PlanningContext
from ...plan.made import MadePlans
from ...settings import Settings
from ...stages import Stages
from ..feature import Feature
from .pasted import Layers, measure_code
from .search import QuantizedPlans


class Quantization(Feature):
    """Finds the fewest bits per weight within the error budget."""

    @classmethod
    def wants(cls, options: Settings) -> bool:
        """Whether there are schemes to choose from."""
        return bool(options.schemes)

    def after_plans(self, made: MadePlans, planning: PlanningContext, stages: Stages) -> MadePlans:
        """The plans, with those of quantization schemes, and the model that ran them."""
        with stages("schemes", "find the fewest bits per weight within the error budget"):
            search = QuantizedPlans(planning)
            schemes = measure_code(search.plans(), _layers_of(planning), planning, search.model)
        return replace(made, quantized_plans=schemes, quantized_model=search.model)


FEATURE = Quantization


def _layers_of(planning: PlanningContext) -> Layers:
    """The quantized layers, and what decides which of them code for a library can name."""
    about = fields_of(planning.subject.model, ())
    metric = planning.output_metric
    return Layers(
        planning.judged.layers, about["shared_modules"], about["tied_parameters"], metric.criteria, metric.budget
    )
