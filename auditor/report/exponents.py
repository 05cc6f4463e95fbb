"""Charts of where values lie: exponents of one tensor, and of all tensors against depth, between a format's edges."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ..numerics.formats import FORMATS
from ..records import Magnitudes
from ..records.audit import Audit
from .charts import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, Tick, scale
from .words import label, percent, power

LOW, HIGH = -36, 24
COLUMNS = 96
LEVELS = 5
BARS_WIDTH, BARS_HEIGHT = 360, 92


@dataclass(frozen=True)
class Band:
    """A stretch of exponents that a format treats alike. kind: zero | subnormal | normal | over."""

    kind: str
    start: float
    end: float


@dataclass(frozen=True)
class Bars:
    """An exponent histogram on a square-root scale, in the bands of one format; outside: share of values it cannot hold."""

    format: str
    bars: tuple[tuple[float, float, float], ...]
    width: float
    bands: tuple[Band, ...]
    ticks: tuple[Tick, ...]
    summary: str


@dataclass(frozen=True)
class Map:
    """Exponents (up) against the order of the tensors (right): one path per level of density."""

    format: str
    levels: tuple[str, ...]
    bands: tuple[Band, ...]
    y_ticks: tuple[Tick, ...]
    per_column: int


def narrowest(formats: tuple[str, ...]) -> str | None:
    """The format whose largest number is smallest, which is where ranges hurt first."""
    return min(formats, key=lambda name: FORMATS[name].largest, default=None)


def _edges(fmt: str) -> tuple[float, float, float]:
    """Exponents of the smallest subnormal, the smallest normal and the largest number."""
    row = FORMATS[fmt]
    return row.min_exponent - row.mantissa, row.min_exponent, math.log2(row.largest)


def bars(span: Magnitudes | None, formats: tuple[str, ...]) -> Bars | None:
    """One tensor's exponents against the narrowest format; None where there is nothing to draw."""
    fmt = narrowest(formats)
    if span is None or not span.exponents or fmt is None:
        return None
    shares = _clamped(span.exponents)
    x = scale(LOW, HIGH + 1, 0, BARS_WIDTH)
    top = max(shares.values())
    heights = {e: round(max(1.0, (BARS_HEIGHT - 22) * math.sqrt(share / top)), 1) for e, share in shares.items()}
    return Bars(
        label(fmt),
        tuple((x(e), round(BARS_HEIGHT - 18 - h, 1), h) for e, h in sorted(heights.items())),
        round(BARS_WIDTH / (HIGH + 1 - LOW) - 0.8, 1),
        _bands(fmt, x),
        tuple(Tick(x(e), power(2, e)) for e in (-24, -14, 0, 16)),
        _summary(span, fmt),
    )


def _clamped(exponents: Mapping[int, int]) -> dict[int, float]:
    total = sum(exponents.values())
    shares: dict[int, float] = {}
    for exponent, n in exponents.items():
        at = min(max(exponent, LOW), HIGH)
        shares[at] = shares.get(at, 0.0) + n / total
    return shares


def _bands(fmt: str, place: Callable[[float], float]) -> tuple[Band, ...]:
    stops = (LOW, *_edges(fmt), HIGH + 1)
    kinds = ("zero", "subnormal", "normal", "over")
    return tuple(
        Band(kind, place(low), place(high))
        for kind, low, high in zip(kinds, stops, stops[1:], strict=False)
        if low < high
    )


def _summary(span: Magnitudes, fmt: str) -> str:
    (zero, normal, top), total = _edges(fmt), sum(span.exponents.values())
    over = sum(n for e, n in span.exponents.items() if e >= top) / total
    small = sum(n for e, n in span.exponents.items() if zero <= e < normal) / total
    lost = sum(n for e, n in span.exponents.items() if e < zero - 1) / total
    parts = [
        f"{percent(share)} {what}"
        for share, what in ((over, "above the largest"), (small, "subnormal"), (lost, "lost to zero"))
        if share
    ]
    return f"{label(fmt)}: " + (", ".join(parts) if parts else "every value fits in the normal range")


def exponent_map(audit: Audit) -> Map | None:
    """Exponents of all operations' outputs against depth; None where no range was recorded."""
    fmt = narrowest(audit.formats)
    spans = [r.range for r in audit.nodes if r.range is not None and r.range.exponents]
    if not spans or fmt is None:
        return None
    per_column = math.ceil(len(spans) / COLUMNS)
    columns = [_column(spans[i : i + per_column]) for i in range(0, len(spans), per_column)]
    x = scale(0, len(columns), LEFT, WIDTH - RIGHT)
    y = scale(LOW, HIGH + 1, HEIGHT - BOTTOM, TOP)
    cell = (HEIGHT - BOTTOM - TOP) / (HIGH + 1 - LOW)
    paths = [""] * LEVELS
    for i, column in enumerate(columns):
        for exponent, share in sorted(column.items()):
            level = min(int(LEVELS * math.sqrt(share)), LEVELS - 1)
            width = round(x(i + 1) - x(i), 1)
            paths[level] += f"M{x(i):g} {y(exponent + 1):g}h{width:g}v{cell:.1f}h-{width:g}z"
    return Map(
        label(fmt),
        tuple(paths),
        _bands(fmt, y),
        tuple(Tick(y(e), power(2, e)) for e in (-32, -24, -14, 0, 16)),
        per_column,
    )


def _column(spans: list[Magnitudes]) -> dict[int, float]:
    column: dict[int, float] = {}
    for span in spans:
        for exponent, share in _clamped(span.exponents).items():
            column[exponent] = max(column.get(exponent, 0.0), share)
    return column
