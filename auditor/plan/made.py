"""The result of the planning stages: plans, and everything that is made with them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..measure.layers import QuantizedModel
from ..records import Plan, Timing, Today, Verification
from ..records.decisions import Decisions
from ..records.quantization import QuantizedPlan


@dataclass(frozen=True)
class MadePlans:
    """Plans and baselines, by name, and other fields of Audit.

    decisions: results of compare_fixed_decisions. warnings: sentences on what could not be made. quantized_model: runs the
    model with quantized layers, if there are plans of quantization schemes.
    """

    plans: Mapping[str, Plan] = field(default_factory=dict)
    baselines: Mapping[str, Verification] = field(default_factory=dict)
    programs: Mapping[str, bytes] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    fp32_today: Today | None = None
    decisions: tuple[Decisions, ...] = ()
    timing: Timing | None = None
    quantized_plans: tuple[QuantizedPlan, ...] = ()
    quantized_model: QuantizedModel | None = None
