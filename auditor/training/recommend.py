"""FP16 with a scaler, BF16 without one, or FP32."""

from __future__ import annotations

import math
from collections.abc import Mapping

from .records import LossScale
from .window import scaler_code


def recommend(
    formats: tuple[str, ...], scale: LossScale | None, errors: Mapping[str, float | None], recommended: str | None
) -> tuple[str | None, str]:
    """The format to train in, and why, in one sentence."""
    finite = {fmt: error for fmt, error in errors.items() if error is not None and math.isfinite(error)}
    if finite and not any(finite.values()):
        return None, "FP32: autocast lowers nothing in this step"
    fp16 = "fp16" in finite and scale is not None and scale.init is not None
    if "bf16" in finite and (not fp16 or (recommended or "").endswith("bf16")):
        return "bf16", f"BF16 without a scaler: {_why_bf16(formats, scale, fp16, finite)}"
    if fp16 and scale is not None and scale.init is not None:
        return "fp16", (
            f"FP16 with {scaler_code(scale.init)}: scales from {scale.minimum:,.10g} to {scale.maximum:,.10g} overflow "
            f"nothing and keep flushed gradients within {scale.allowed:.0%}"
        )
    return None, "FP32: in no format does one training step give finite gradients"


def _why_bf16(formats: tuple[str, ...], scale: LossScale | None, fp16: bool, finite: Mapping[str, float]) -> str:
    error = f"its gradients differ from FP32's by {finite['bf16']:.2g}"
    if "fp16" not in formats or scale is None:
        return error
    if scale.closed_by is not None:
        return (
            f"no loss scale suits FP16: {scale.closed_by or 'the model'} overflows beyond {scale.maximum:,.10g}, and "
            f"{scale.minimum:,.10g} is needed to keep flushed gradients within {scale.allowed:.0%}"
        )
    if not fp16:
        return f"an FP16 step gives no finite gradients; {error}"
    needed = f"FP16 would need a loss scale of {scale.minimum:,.10g} to {scale.maximum:,.10g}"
    return f"the recommended plan runs in it, {error}, and {needed}"
