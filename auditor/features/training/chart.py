"""The chart of a training step: gradients against the range of FP16."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

from ...numerics.formats import FORMATS
from ...numerics.histogram import merge_magnitudes, significant, subnormal_share, underflow_share
from ...records import Magnitudes
from ...records.training import Training
from ...report.blocks import BOTTOM, LEFT, RIGHT, Chart
from ...report.charts import TOP, scale
from ...report.words import percent, power

LOWEST, HIGHEST = -48, 24
"""Exponents of two at the ends of the gradients' axis; a value beyond an end is drawn at that end."""
BANDS = (("over", "above the largest number"), ("subnormal", "subnormal"), ("zero", "lost to zero"))


def gradient_chart(training: Training) -> Chart | None:
    """A histogram of the low-precision gradients against FP16's range, with and without the loss scale; None without
    nonzero ones."""
    of_modules = [module.low for module in training.modules if module.low is not None]
    of_parameters = [significant(parameter.gradient) for parameter in training.parameters if parameter.low]
    pool = merge_magnitudes([*of_modules, *of_parameters])
    if not pool.nonzero:
        return None
    height = 230
    x = scale(LOWEST, HIGHEST + 1, LEFT, RIGHT)
    init = training.fp16.init if training.fp16 else None
    shift = round(math.log2(init)) if init else 0
    paths = _fp16_bands(x, height)
    paths.append(("gradient-plain", _staircase(pool, 0, x, height)))
    legend = [("gradient-plain", "without a loss scale")]
    if init is not None and init != 1:
        paths.append(("gradient-scaled", _staircase(pool, shift, x, height)))
        legend.append(("gradient-scaled", f"scaled by {init:,.10g}"))

    zero, subnormal = _lost_shares(pool, 0)
    about = (
        f"Without a loss scale, {zero} of the low-precision gradient values become zero in FP16, "
        f"and {subnormal} become subnormal"
    )
    if init is not None:
        scaled = " and ".join(_lost_shares(pool, shift))
        about += f"; with a loss scale of {init:,.10g}, these shares are {scaled}"
    return Chart(
        "Gradients against the range of FP16",
        f"{about}. Heights show shares of the gradient values, on a square-root scale.",
        height,
        tuple(paths),
        (*legend, *BANDS),
        "magnitude of a gradient",
        tuple((x(exponent), power(2, exponent)) for exponent in (-40, -32, -24, -14, 0, 16)),
    )


def _fp16_bands(x: Callable[[float], float], height: int) -> list[tuple[str, str]]:
    """(CSS classes, SVG path) of the ranges in which FP16 values are zero, subnormal, normal, or too large."""
    fp16 = FORMATS["fp16"]
    smallest_subnormal = fp16.min_exponent - fp16.mantissa
    stops = (LOWEST, smallest_subnormal, fp16.min_exponent, math.log2(fp16.largest), HIGHEST + 1)
    bands = list[tuple[str, str]]()
    for kind, (low, high) in zip(("zero", "subnormal", "normal", "over"), pairwise(stops), strict=True):
        path = f"M{x(low):g} {TOP}H{x(high):g}V{height - BOTTOM}H{x(low):g}z"
        bands.append((f"band {kind}", path))
    return bands


def _lost_shares(pool: Magnitudes, shift: int) -> tuple[str, str]:
    """Percentages of gradients, multiplied by 2^shift, that become zero and subnormal in FP16."""
    fp16 = FORMATS["fp16"]
    zero = underflow_share(pool.exponents, fp16, shift)
    subnormal = subnormal_share(pool.exponents, fp16, shift)
    return percent(zero), percent(subnormal)


def _staircase(pool: Magnitudes, shift: int, x: Callable[[float], float], height: int) -> str:
    """The outline of a histogram as an SVG path; heights are on a square-root scale up to the largest bin."""
    total = sum(pool.exponents.values())
    shares: dict[int, float] = {}  # {exponent, shifted and clamped to the chart: share of the entries}
    for exponent, entries in pool.exponents.items():
        at = min(max(exponent + shift, LOWEST), HIGHEST)
        shares[at] = shares.get(at, 0.0) + entries / total
    base = height - BOTTOM
    y = scale(0.0, math.sqrt(max(shares.values())), base, TOP)
    first = min(shares)
    steps = []
    for exponent in range(first, max(shares) + 1):
        top = y(math.sqrt(shares.get(exponent, 0.0)))
        steps.append(f"V{top:g}H{x(exponent + 1):g}")
    return f"M{x(first):g} {base}{''.join(steps)}V{base}z"
