"""Geometry of the training charts: gradients against FP16's window, flushed gradients against the loss scale."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..numerics.formats import FORMATS
from ..numerics.histogram import flushed, merged, significant, subnormal
from ..records import Magnitudes
from ..records.training import Training
from .charts import LEFT, RIGHT, WIDTH, Tick, scale
from .exponents import Band
from .words import percent, power

LOW, HIGH = -48, 24
HEIGHT, TOP, BOTTOM = 230, 14, 36
FP16 = FORMATS["fp16"]


@dataclass(frozen=True)
class Outline:
    """One histogram as a path. key: how it is drawn; label: what it shows."""

    key: str
    label: str
    path: str


@dataclass(frozen=True)
class GradientChart:
    """Magnitudes of the low gradients in the bands of FP16, before and after the loss scale."""

    bands: tuple[Band, ...]
    outlines: tuple[Outline, ...]
    ticks: tuple[Tick, ...]
    summary: str
    height: int = HEIGHT
    bottom: int = HEIGHT - BOTTOM


@dataclass(frozen=True)
class WindowChart:
    """Flushed share against the loss scale. open: the window in pixels, None if empty; overflow: where it begins."""

    line: str
    allowed: float
    open: tuple[float, float] | None
    overflow: float
    init: float | None
    ticks: tuple[Tick, ...]
    shares: tuple[Tick, ...]
    height: int = HEIGHT
    bottom: int = HEIGHT - BOTTOM


def _low(found: Training) -> Magnitudes:
    spreads = [m.low for m in found.modules if m.low is not None]
    return merged([*spreads, *(significant(p.gradient) for p in found.parameters if p.low)])


def gradient_chart(found: Training) -> GradientChart | None:
    """The low gradients in FP16's bands; None where none is low."""
    pool = _low(found)
    if not pool.nonzero:
        return None
    x = scale(LOW, HIGH + 1, LEFT, WIDTH - RIGHT)
    edge = FP16.min_exponent - FP16.mantissa
    stops = (LOW, edge - 1, FP16.min_exponent, 16, HIGH + 1)
    kinds = ("zero", "subnormal", "normal", "over")
    bands = tuple(Band(k, x(a), x(b)) for k, a, b in zip(kinds, stops, stops[1:], strict=False))
    outlines = [Outline("plain", "without a loss scale", _outline(pool.exponents, 0))]
    init = found.fp16.init if found.fp16 else None
    if init is not None and init != 1:
        shift = round(math.log2(init))
        outlines.append(Outline("scaled", f"scaled by {init:,.10g}", _outline(pool.exponents, shift)))
    ticks = tuple(Tick(x(e), power(2, e)) for e in (-40, -32, -24, -14, 0, 16))
    return GradientChart(bands, tuple(outlines), ticks, _summary(pool, init))


def _outline(exponents: Mapping[int, int], shift: int) -> str:
    """A closed staircase; heights are shares of the largest bin, on a square-root scale."""
    x = scale(LOW, HIGH + 1, LEFT, WIDTH - RIGHT)
    y = scale(0.0, 1.0, HEIGHT - BOTTOM, TOP)
    counts: dict[int, int] = {}
    for exponent, count in exponents.items():
        at = min(max(exponent + shift, LOW), HIGH)
        counts[at] = counts.get(at, 0) + count
    top = max(counts.values())
    low, high = min(counts), max(counts)
    steps = "".join(f"V{y(math.sqrt(counts.get(e, 0) / top)):g}H{x(e + 1):g}" for e in range(low, high + 1))
    return f"M{x(low):g} {HEIGHT - BOTTOM}{steps}V{HEIGHT - BOTTOM}z"


def _summary(pool: Magnitudes, init: float | None) -> str:
    plain = f"Without a scale {percent(flushed(pool.exponents, FP16))} of the gradients that FP16 holds become zero"
    plain += f" and {percent(subnormal(pool.exponents, FP16))} are subnormal"
    if init is None:
        return f"{plain}."
    shift = round(math.log2(init))
    after = f"{percent(flushed(pool.exponents, FP16, shift))} and {percent(subnormal(pool.exponents, FP16, shift))}"
    return f"{plain}; scaled by {init:,.10g}, {after}."


def window_chart(found: Training) -> WindowChart | None:
    """Flushed share against the loss scale, on a square-root scale; None where there is no window."""
    window = found.fp16
    if window is None:
        return None
    powers = sorted(window.flushed)
    top, needed = math.log2(window.maximum), math.log2(window.minimum)
    x = scale(powers[0], powers[-1], LEFT, WIDTH - RIGHT)
    most = max(*window.flushed.values(), 2 * window.allowed)
    y = scale(0.0, math.sqrt(most), HEIGHT - BOTTOM, TOP)
    points = [(x(k), y(math.sqrt(window.flushed[k]))) for k in powers]
    every = max(1, math.ceil(len(powers) / 12))
    return WindowChart(
        "M" + "L".join(f"{a:g} {b:g}" for a, b in points),
        y(math.sqrt(window.allowed)),
        (x(needed), x(top)) if window.init is not None else None,
        x(top),
        x(math.log2(window.init)) if window.init is not None else None,
        tuple(Tick(x(k), power(2, k)) for k in powers[::every]),
        tuple(Tick(y(math.sqrt(s)), percent(s)) for s in _shares(most)),
    )


def _shares(most: float) -> Sequence[float]:
    return [share for share in (0.0, 0.01, 0.05, 0.2, 0.5, 1.0) if share <= most]
