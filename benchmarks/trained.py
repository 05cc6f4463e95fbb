"""Plans for trained models on inputs they were not made from: what stays low within a budget of one percent, and what
can be quantized within five."""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import suppress
from dataclasses import replace
from typing import Any

from auditor.errors import PlanError
from auditor.execution.policy import choice_from_scopes
from auditor.flow import run
from auditor.loading import from_object
from auditor.records import Plan
from auditor.records.audit import Audit
from auditor.settings import Settings
from benchmarks.harness import Row, in_process_of_its_own, report
from benchmarks.subjects import BATCH  # importing it lets timm and others see a torchvision without operators
from benchmarks.trained_models import TRAINED

BUDGET, QUANTIZED_BUDGET = 0.01, 0.05
SCHEMES = ("fp8,int8,mxfp8,nvfp4", "fp8,int8_weights")
"""Of linear layers; of convolutions, if a model has no layers for the first ones."""
COLUMNS = {
    "model": "",
    "plan": "",
    "without it": ".2g",
    "predicted": ".2g",
    "measured": ".2g",
    "FLOPs low": ".1%",
    "islands": "d",
    "holds": "",
}
QUANTIZED = {
    "model": "",
    "plan": "",
    "layers": "",
    "bits": ".2f",
    "sum of single": ".2g",
    "predicted": ".2g",
    "measured": ".2g",
    "held-out": ".2g",
    "weights": ".0%",
}


def audited(name: str, **options: Any) -> Audit:
    """The model's audit, checked on its held-out inputs."""
    assert BATCH
    model, args, others = TRAINED[name]()
    subject = replace(from_object(model.eval(), args), held_out=((others, {}),))
    return run(subject, Settings(command="", device="cpu", **options))


def rows_of(name: str) -> list[Row]:
    """One row per plan."""
    audit = audited(name, max_error=BUDGET)
    return [row_of(name, audit, plan) for plan in audit.plans.values()]


def quantized_rows(name: str) -> list[Row]:
    """One row per plan of schemes. sum of single: of the errors with one group of layers quantized; predicted, measured:
    on the calibration inputs."""
    for schemes in SCHEMES:
        with suppress(PlanError):  # a scheme that fits no layer
            audit = audited(name, max_error=QUANTIZED_BUDGET, formats=schemes)
            break
    else:
        return []
    return [
        {
            "model": name,
            "plan": plan.name,
            "layers": f"{sum(map(bool, plan.layers.values()))} of {len(plan.layers)}",
            "bits": plan.effective_bits,
            "sum of single": plan.single_errors,
            "predicted": plan.predicted_error,
            "measured": plan.calibration_error,
            "held-out": _number(plan.held_out_error),
            "weights": plan.weights_share,
        }
        for plan in audit.quantized_plans
    ]


def row_of(name: str, audit: Audit, plan: Plan) -> Row:
    """islands: FP32 modules that lie directly in a low one, or low ones in an FP32 model."""
    baseline = audit.baselines[plan.name]
    return {
        "model": name,
        "plan": plan.name,
        "without it": _number(baseline.measured_error),
        "predicted": plan.predicted_error,
        "measured": _number(plan.measured_error),
        "FLOPs low": plan.low_precision_flops,
        "islands": sum(choice_from_scopes(plan.scopes)("") != choice.precision for choice in plan.scopes.values()),
        "holds": str(plan.is_verified),
    }


def _number(value: float | None) -> float:
    return float("nan") if value is None else value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", metavar="MODEL", default=list(TRAINED))
    parser.add_argument("--packages", metavar="DIR", default="", help="where the packages of the models are installed")
    parser.add_argument("--measure", metavar="MODEL", help="one model, as JSON")
    options = parser.parse_args()
    if options.packages:
        sys.path.append(options.packages)
    if options.measure:
        print(json.dumps({"rows": rows_of(options.measure), "quantized": quantized_rows(options.measure)}))
        return
    place = ("--packages", options.packages) if options.packages else ()
    found = [in_process_of_its_own("benchmarks.trained", "--measure", name, *place) for name in options.models]
    report("trained", [row for each in found for row in each["rows"]], COLUMNS)
    report("trained_quantized", [row for each in found for row in each["quantized"]], QUANTIZED)


if __name__ == "__main__":
    main()
