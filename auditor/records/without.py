"""What happens without a plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from .plan import CriterionValue
from .run import NonFinite
from .written import Written


@dataclass(frozen=True)
class Outcome:
    """What a whole model gave without a plan."""

    measured_error: Annotated[
        float | None,
        Written(
            "of the whole model under plain autocast, or plainly cast, on the inputs that plans are verified on; worst "
            "batch; `null`: it failed or was not finite"
        ),
    ]
    finite: Annotated[bool, Written("whether the outputs were")]
    failure: Annotated[str | None, Written("why it did not run")] = None


@dataclass(frozen=True)
class RulesOnly(Outcome):
    """The same with FP32 in every module where a rule fired, measurements left aside."""

    low_precision_flops: Annotated[
        float | None, Written("share of the floating-point operations that run low", least=0, most=1)
    ] = None


@dataclass(frozen=True)
class Baseline(Outcome):
    """What happens without a plan: the whole model under plain autocast, or plainly cast."""

    rules_only: Annotated[
        RulesOnly | None,
        Written(
            "the same with FP32 in every module where a rule fired, measurements left aside; it also has "
            "`low_precision_flops`",
        ),
    ] = None
    criteria: Annotated[
        tuple[CriterionValue, ...], Written("the criteria that were set, each with what it came to", sparse=True)
    ] = ()
    nonfinite: Annotated[
        NonFinite | None,
        Written(
            "where the run is not finite: its first operation that is not; not there where the recorded graph, run so, "
            "stays finite",
            key="first_non_finite",
            sparse=True,
        ),
    ] = None
