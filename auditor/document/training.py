"""The `training` entry of plan.json."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ..formats.histogram import flushed, subnormal
from ..formats.table import FORMATS
from ..records import Magnitudes
from ..records.training import BackwardError, BackwardNode, LossScale, ParameterGradients, Training


def training_document(found: Training) -> dict[str, Any]:
    """What plan.json holds of a training audit (docs/plan-json.md). Non-finite numbers become null."""
    return {
        "recommended": found.format,
        "recommendation": found.recommendation,
        "plan": found.plan,
        "loss": _number(found.loss),
        "loss_source": found.loss_source,
        "fp16": _window(found.fp16) if found.fp16 else None,
        "bf16": {
            "flushed_share": _number(found.bf16.flushed),
            "lost_updates_adam": {f"{rate:g}": _number(share) for rate, share in found.bf16.lost_adam.items()},
            "lost_updates_sgd": {f"{rate:g}": _number(share) for rate, share in found.bf16.lost_sgd.items()},
        }
        if found.bf16
        else None,
        "gradient_error": {fmt: _number(error) for fmt, error in found.errors.items()},
        "trials": [
            {
                "scale": trial.scale,
                "flushed": _number(trial.flushed),
                "predicted_flushed": _number(trial.predicted),
                "overflow": trial.overflow,
                "predicted_overflow": trial.predicted_overflow,
            }
            for trial in found.trials
        ],
        "modules": [
            {
                "module": module.module,
                "activation_gradients": _spread(module.activations),
                "low_gradients": _spread(module.low) if module.low else None,
            }
            for module in found.modules
        ],
        "parameters": [_parameter(parameter) for parameter in found.parameters],
        "nodes": [_node(node) for node in found.nodes],
        "batch_sizes": [
            {
                "samples": row.samples,
                "max_gradient": _number(row.max_gradient),
                "gradient_norm": _number(row.gradient_norm),
                "flushed_share_unscaled": _number(row.flushed_unscaled),
                "gradient_error": {fmt: _number(error) for fmt, error in row.error.items()},
            }
            for row in found.batch_sizes
        ],
        "advice": [
            {
                "code": advice.code,
                "title": advice.title,
                "text": advice.text,
                "evidence": {k: _number(v) if isinstance(v, float) else v for k, v in advice.evidence.items()},
            }
            for advice in found.advice
        ],
        "attribution": found.attribution,
    }


def _window(window: LossScale) -> dict[str, Any]:
    return {
        "min_loss_scale": window.minimum,
        "max_loss_scale": window.maximum,
        "init_scale": window.init,
        "flushed_share_unscaled": _number(window.flushed_unscaled),
        "allowed_flushed_share": window.allowed,
        "closed_by": window.closed_by,
        "largest_gradient_in": window.largest,
        "most_flushed_in": window.starved,
        "flushed_share": {str(power): _number(share) for power, share in window.flushed.items()},
        "subnormal_share": {str(power): _number(share) for power, share in window.subnormal.items()},
    }


def _parameter(parameter: ParameterGradients) -> dict[str, Any]:
    return {
        "name": parameter.name,
        "module": parameter.module,
        "low": parameter.low,
        "weight": _spread(parameter.weight),
        "gradient": _spread(parameter.gradient),
        "update_ratio_exponents": _counts(parameter.ratios),
    }


def _spread(spread: Magnitudes) -> dict[str, Any]:
    fp16 = FORMATS["fp16"]
    return {
        "exponents": _counts(spread.exponents),
        "zeros": spread.zeros,
        "nonfinite": spread.nonfinite,
        "max_abs": _number(spread.max_abs),
        "norm": _number(spread.norm),
        "fp16_flushed": _number(flushed(spread.exponents, fp16)),
        "fp16_subnormal": _number(subnormal(spread.exponents, fp16)),
        "bf16_rounding": _number(spread.rounding.get("bf16")),
        "fp16_rounding": _number(spread.rounding.get("fp16")),
    }


def _node(node: BackwardNode) -> dict[str, Any]:
    return {
        "name": node.name,
        "op": node.op,
        "owner": node.owner,
        "source": node.source,
        **{fmt: _error(error, node.reasons.get(fmt)) for fmt, error in node.errors.items()},
    }


def _error(error: BackwardError, reason: str | None) -> dict[str, Any]:
    return {
        "error": _number(error.error),
        "nonfinite": error.nonfinite,
        "reaches": error.reaches,
        "unsupported": error.unsupported,
        "contribution": _number(error.contribution),
        "contribution_backward": _number(error.backward),
        "decided_by": error.decided_by,
        "unsafe": reason,
    }


def _counts(counts: Mapping[int, int]) -> dict[str, int]:
    return {str(exponent): count for exponent, count in sorted(counts.items())}


def _number(value: float | None) -> float | None:
    """Seven significant digits, as everywhere in the file."""
    if value is None or not math.isfinite(value):
        return None
    return float(f"{value:.7g}")
