"""Recommends a training format: FP16 with a gradient scaler, BF16 without one, or FP32."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

from ..artefact.strategies import strategy_of
from ..numerics.formats import label
from ..plan.recommend import kept_clause, recommend
from ..records import Plan
from ..records.training import LossScale, Training
from .window import scaler_code

TOLERATED = 0.1
"""Largest relative gradient error of a recommended format: the step then points within 6 degrees of FP32's."""


def format_to_train_in(
    formats: tuple[str, ...],
    scale: LossScale | None,
    errors: Mapping[str, float | None],
    recommended: str | None,
    idle: Collection[str] = (),
) -> tuple[str | None, str]:
    """The format to train in, with the reason in one sentence.

    idle: formats whose verified autocast plans run nothing low, although some were requested.
    """
    near = {fmt: error for fmt, error in errors.items() if error is not None and error <= TOLERATED}
    if near and not any(errors.values()):
        return None, "FP32: autocast runs nothing in low precision in this step"
    if near and set(near) <= set(idle):
        return None, f"FP32: no verified plan under autocast runs anything in {' or '.join(map(label, near))}"
    near = {fmt: error for fmt, error in near.items() if fmt not in idle}
    fp16 = "fp16" in near and scale is not None and scale.init is not None
    closer = fp16 and near.get("bf16", math.inf) < near["fp16"]
    if "bf16" in near and (not fp16 or closer or (recommended or "").endswith("bf16")):
        return "bf16", f"BF16 without a scaler: {_why_bf16(formats, scale, errors, closer, 'fp16' in idle)}"
    if fp16 and scale is not None and scale.init is not None:
        return "fp16", (
            f"FP16 with {scaler_code(scale.init)}: at scales from {scale.minimum:,.10g} to "
            f"{scale.maximum:,.10g} nothing overflows and at most {scale.allowed:.0%} of the "
            f"gradients underflow{_why_not_bf16(errors, 'bf16' in idle)}"
        )
    return None, f"FP32: {_why_fp32(errors)}"


def _why_fp32(errors: Mapping[str, float | None]) -> str:
    finite = {fmt: error for fmt, error in errors.items() if error is not None and math.isfinite(error)}
    if not finite:
        return "no format gives finite gradients in a training step"
    best = min(finite, key=lambda fmt: finite[fmt])
    if finite[best] <= TOLERATED:
        return "no loss scale suits FP16"
    others = "" if len(errors) == 1 else ", and no other format is more accurate"
    return f"{_off(best, finite[best])}{others}"


def _why_bf16(
    formats: tuple[str, ...], scale: LossScale | None, errors: Mapping[str, float | None], closer: bool, idle: bool
) -> str:
    error = f"its gradients differ from FP32's by {errors['bf16']:.2g}"
    if "fp16" not in formats or scale is None:
        return error
    if scale.closed_by is not None:
        return (
            f"no loss scale suits FP16: {scale.closed_by or 'the model'} overflows above {scale.maximum:,.10g}, but at "
            f"least {scale.minimum:,.10g} is needed for at most {scale.allowed:.0%} underflow"
        )
    fp16 = errors.get("fp16")
    if fp16 is None or not math.isfinite(fp16):
        return f"an FP16 step gives no finite gradients; {error}"
    if not fp16 <= TOLERATED:
        return f"{_off('fp16', fp16)}; {error}"
    if idle:
        return f"no verified plan under autocast runs anything in FP16; {error}"
    if closer:
        return f"{error}, FP16's by {fp16:.2g}"
    needed = f"FP16 would need a loss scale of {scale.minimum:,.10g} to {scale.maximum:,.10g}"
    return f"the recommended plan runs in it, {error}, and {needed}"


def _why_not_bf16(errors: Mapping[str, float | None], idle: bool) -> str:
    if idle:
        return "; no verified plan under autocast runs anything in BF16"
    error = errors.get("bf16")
    return "" if error is None or error <= TOLERATED else f"; {_off('bf16', error)}"


def _off(fmt: str, error: float) -> str:
    name = label(fmt)
    if not math.isfinite(error):
        return f"{name} gives no finite gradients"
    return f"the gradients of {name} have an error of {error:.0%}, above the tolerated {TOLERATED:.0%}"


def recommend_plan(
    training: Training,
    plans: Mapping[str, Plan],
    recommended: str | None,
    reason: str,
    max_error: float,
    use: str = "training",
) -> tuple[str | None, str]:
    """The recommended plan and its reason, adjusted for training: the plan to train under, or none for FP32.

    Plans are chosen by output error; a step may need more accuracy, or a range that FP16 lacks. Without a requested
    autocast plan or training audit, the recommendation stays.
    """
    if use != "training":
        return recommend(plans, max_error, use, {f"autocast_{training.format}"})
    if training.format is None:
        if recommended is None:
            return None, reason
        why = training.recommendation.removeprefix("FP32: ")
        return None, f"Train in FP32: {why}. For inference, {recommended} meets the error budget."
    trains = (plan for plan in plans.values() if strategy_of(plan.strategy).trains)
    wanted = next((plan for plan in trains if plan.format == training.format), None)
    if wanted is None or wanted.name == recommended or (wanted.score and not wanted.score.holds):
        return recommended, reason
    return wanted.name, (
        f"{label(wanted.format)} under autocast: measured error {wanted.measured_error:.2g} within the budget, "
        f"{kept_clause(wanted)}. It is the plan to train under: {training.recommendation}."
    )
