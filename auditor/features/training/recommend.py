"""Recommends a training format (FP16 with a usable loss scale, BF16, or FP32), and estimates updates that BF16 weights
lose."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping

import torch

from ...artefact.strategies import strategy_of
from ...numerics.formats import FORMATS, label
from ...numerics.histogram import exponent_counts, largest_scale, merge_magnitudes, subnormal_share, underflow_share
from ...plan.recommend import kept_apart, recommend
from ...records import Magnitudes, Plan, Verification
from ...records.training import LossScale, ParameterGradients, Training
from ...training.limits import HEADROOM, TOLERATED

ALLOWED = 0.01
"""Largest acceptable share of the non-zero low-precision gradients that underflow to zero."""

_HIGHEST = 126
FP16 = FORMATS["fp16"]

RATES = (1e-1, 1e-2, 1e-3, 1e-4, 1e-5)
"""Learning rates for which the share of updates that BF16 loses is estimated."""

_HALF_SPACING = FORMATS["bf16"].mantissa + 1
_NEVER = 200
"""Key in `ratios` of weights that are zero, above all other keys: near zero BF16 represents any update."""


def format_to_train_in(
    formats: tuple[str, ...],
    scale: LossScale | None,
    errors: Mapping[str, float | None],
    preferred: str | None,
    idle: Collection[str] = (),
    *,
    tolerated: float = TOLERATED,
    unclear: Mapping[str, tuple[float, float]] | None = None,
) -> tuple[str | None, str]:
    """The format to train in, with the reason in words; or None, with a whole sentence on why none is recommended.

    preferred: the format of the best plan by the errors of the outputs, if any. idle: formats with a requested autocast plan that is not verified or runs nothing in low precision. tolerated: the
    largest gradient error of a recommended format. unclear: {format whose error may be on either side: its interval}.
    """
    unclear = unclear or {}
    near = {fmt: error for fmt, error in errors.items() if error is not None and error <= tolerated}
    near = {fmt: error for fmt, error in near.items() if fmt not in unclear}
    if near and not any(errors.values()):
        return None, "autocast runs nothing in low precision in this step, so that no format changes it"
    if near and set(near) <= set(idle):
        names = " or ".join(map(label, near))
        return None, f"no format is recommended for training: no verified plan under autocast runs anything in {names}"
    near = {fmt: error for fmt, error in near.items() if fmt not in idle}
    fp16 = "fp16" in near and scale is not None and scale.init is not None
    closer = fp16 and near.get("bf16", math.inf) < near["fp16"]
    if "bf16" in near and (not fp16 or closer or preferred == "bf16"):
        why = _why_bf16(formats, scale, errors, closer, "fp16" in idle, tolerated)
        return "bf16", f"BF16 without a scaler: {why}"
    if fp16 and scale is not None and scale.init is not None:
        bf16 = errors.get("bf16")
        beside = f"; {_off('bf16', bf16, tolerated)}" if bf16 is not None and not bf16 <= tolerated else ""
        if "bf16" in idle:
            beside = "; no verified plan under autocast runs anything in BF16"
        return "fp16", (
            f"FP16 with {scaler_code(scale.init)}: at loss scales from {scale.minimum:,.10g} to "
            f"{scale.maximum:,.10g} no gradient overflows, and at most {scale.allowed:.0%} of the "
            f"gradient values become zero{beside}"
        )
    if unclear:
        return None, _undecided(unclear, errors, tolerated)
    return None, f"low precision is not recommended for training: {_why_fp32(errors, tolerated)}"


def _undecided(unclear: Mapping[str, tuple[float, float]], errors: Mapping[str, float | None], tolerated: float) -> str:
    """A sentence on errors whose side of the threshold is unknown, and what decides."""
    each = " and ".join(
        f"{label(fmt)} gradients differ from FP32's by {low:.0%} to {high:.0%} (median {errors[fmt] or 0.0:.0%})"
        for fmt, (low, high) in unclear.items()
    )
    return (
        f"the measurements cannot tell whether low precision can train: at slightly changed weights, {each}, and "
        f"{tolerated:.0%} is tolerated; `python -m auditor rehearse` runs real steps"
    )


def _why_fp32(errors: Mapping[str, float | None], tolerated: float) -> str:
    finite = {fmt: error for fmt, error in errors.items() if error is not None and math.isfinite(error)}
    if not finite:
        return "no format gives finite gradients in a training step"
    best = min(finite, key=lambda fmt: finite[fmt])
    if finite[best] <= tolerated:
        return "no loss scale suits FP16"
    others = "" if len(errors) == 1 else ", and no other format is more accurate"
    return f"{_off(best, finite[best], tolerated)}{others}"


def _why_bf16(
    formats: tuple[str, ...],
    scale: LossScale | None,
    errors: Mapping[str, float | None],
    closer: bool,
    idle: bool,
    tolerated: float,
) -> str:
    error = f"BF16 gradients differ from FP32's by {errors['bf16']:.2g}"
    if "fp16" not in formats or scale is None:
        return error
    if scale.closed_by is not None:
        return (
            f"no loss scale suits FP16, since gradients of {scale.closed_by or 'the model'} overflow above {scale.maximum:,.10g}, "
            f"and over {scale.allowed:.0%} of the gradient values become zero below {scale.minimum:,.10g}"
        )
    fp16 = errors.get("fp16")
    if fp16 is None or not math.isfinite(fp16):
        return f"an FP16 step gives no finite gradients; {error}"
    if not fp16 <= tolerated:
        return f"{_off('fp16', fp16, tolerated)}; {error}"
    if idle:
        return f"no verified plan under autocast runs anything in FP16; {error}"
    if closer:
        return f"{error}, and FP16 gradients by {fp16:.2g}"
    usable = f"in FP16 only loss scales of {scale.minimum:,.10g} to {scale.maximum:,.10g} are usable"
    return f"the recommended plan runs in BF16; {error}; {usable}"


def _off(fmt: str, error: float, tolerated: float) -> str:
    name = label(fmt)
    if not math.isfinite(error):
        return f"{name} gives no finite gradients"
    return f"{name} gradients differ from FP32's by {error:.0%}, above the tolerated {tolerated:.0%}"


def choose_plan(
    plans: Mapping[str, Plan],
    max_error: float,
    use: str,
    training: Training,
    baselines: Mapping[str, Verification],
) -> tuple[str | None, str]:
    """The name of the plan to use, None for FP32, and the reason.

    Plans are chosen by output error; a training step may need more accuracy, or a range that FP16 lacks. If `use` is
    not `training`, the step changes only the reason; if no requested plan trains in the step's format, nothing.
    baselines: see `recommend`. Raises: PlanError, as `recommend` does.
    """
    if use != "training":
        return recommend(plans, max_error, use, {f"autocast_{training.format}"}, baselines)
    recommended, reason = recommend(plans, max_error, use, baselines=baselines)
    if training.format is None and recommended is None:
        return recommended, reason
    if training.format is None:
        why = training.recommendation
        return None, f"{why[0].upper()}{why[1:]}. For inference, {recommended} meets the error budget."
    trains = (plan for plan in plans.values() if strategy_of(plan.strategy).trains)
    wanted = next((plan for plan in trains if plan.format == training.format), None)
    if wanted is None or wanted.name == recommended or (wanted.score and not wanted.score.holds):
        return recommended, reason
    return wanted.name, (
        f"{label(wanted.format)} under autocast: measured error {wanted.measured_error:.2g} within the budget, "
        f"{kept_apart(wanted) or 'nothing'} kept in FP32. It is the plan to train under: {training.recommendation}."
    )


def loss_scale(low: Mapping[str, Magnitudes]) -> LossScale | None:
    """The usable loss scales for FP16 gradients; None if all are zero. low: {module: its low-precision gradients}."""
    pool = merge_magnitudes(low.values())
    if not pool.nonzero:
        return None
    # Exponents of two: the largest scale without an overflow, and the smallest without too many underflows.
    top = min(math.floor(math.log2(largest_scale(pool, FP16))), _HIGHEST)
    needed = least_exponent(pool, min(0, top))
    minimum = math.ldexp(1.0, needed)
    maximum = math.ldexp(1.0, top)
    largest = max(low, key=lambda module: low[module].max_abs)
    hungry = max(low, key=lambda module: count_underflows(low[module], top))
    init: float | None = None
    closed_by: str | None = largest
    if needed <= top:
        init = max(minimum, maximum / HEADROOM)
        closed_by = None
    shifts = range(min(0, needed, top) - 4, max(needed, top) + 5)
    return LossScale(
        minimum=minimum,
        maximum=maximum,
        init=init,
        flushed_unscaled=underflow_share(pool.exponents, FP16),
        allowed=ALLOWED,
        closed_by=closed_by,
        largest=largest,
        starved=hungry if count_underflows(low[hungry], top) else None,
        flushed={shift: underflow_share(pool.exponents, FP16, shift) for shift in shifts},
        subnormal={shift: subnormal_share(pool.exponents, FP16, shift) for shift in shifts},
    )


def least_exponent(gradients: Magnitudes, start: int) -> int:
    """The smallest exponent, from `start` on, of a loss scale at which FP16 turns at most the share ALLOWED to zero."""
    scales = range(start, _HIGHEST + 400)
    return next(k for k in scales if underflow_share(gradients.exponents, FP16, k) <= ALLOWED)


def count_underflows(magnitudes: Magnitudes, shift: int = 0) -> int:
    """The number of gradients that FP16 turns to zero at a loss scale of 2 ** shift."""
    return round(underflow_share(magnitudes.exponents, FP16, shift) * magnitudes.nonzero)


def scaler_code(init: float) -> str:
    """Code that creates the GradScaler; all arguments except the initial scale are torch's defaults."""
    return f"GradScaler(init_scale={init:.10g}, growth_factor=2, backoff_factor=0.5, growth_interval=2000)"


def ratios_of(weight: torch.Tensor, gradient: torch.Tensor) -> dict[int, int]:
    """{floor(log2(|g| / half the BF16 spacing at w)): count}, over the entries whose gradient is not zero."""
    flat = gradient.detach().float().reshape(-1)
    counted = torch.isfinite(flat) & (flat != 0)
    g = flat[counted]
    w = weight.detach().float().reshape(-1)[counted]

    is_zero = w == 0  # any update moves such a weight
    exponents = torch.frexp(w).exponent - 1
    half_spacing = torch.ldexp(torch.ones_like(w), exponents - _HALF_SPACING)
    ratios = (g.abs() / half_spacing)[~is_zero]

    counts = exponent_counts(ratios) if ratios.numel() else {}
    if zeros := int(is_zero.sum()):
        counts = {**counts, _NEVER: zeros}
    return counts


def lost_by_sgd(parameters: Iterable[ParameterGradients], rate: float) -> float:
    """Share of the non-zero updates `rate * gradient` that rounding to BF16 discards.

    Within the bin that contains the threshold, magnitudes are assumed uniform on the logarithmic scale.
    """
    counts = [pair for parameter in parameters for pair in parameter.ratios.items()]
    lost = sum(count * min(max(-math.log2(rate) - ratio, 0.0), 1.0) for ratio, count in counts)
    return lost / sum(count for _, count in counts) if counts else 0.0


def lost_by_adam(parameters: Iterable[ParameterGradients], rate: float) -> float:
    """Share of Adam's first updates that rounding to BF16 discards; such an update equals the learning rate.

    All weights count, as if those that get a gradient had magnitudes like those of all weights.
    """
    weights, edge = [parameter.weight for parameter in parameters], math.log2(rate) + _HALF_SPACING
    lost = sum(n for weight in weights for e, n in weight.exponents.items() if e > edge)
    total = sum(weight.nonzero + weight.zeros for weight in weights)
    return lost / total if total else 0.0
