"""Geometry of the charts: records become points, paths and ticks in pixels; the templates only draw them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from ..records import NodeReport, Plan
from ..records.audit import Audit
from .words import label, plan_title, power, ratio

WIDTH, HEIGHT = 1080, 330
LEFT, RIGHT, TOP, BOTTOM = 48, 8, 12, 40
INSET = 8
FRAME = {
    "width": WIDTH,
    "height": HEIGHT,
    "left": LEFT,
    "right": WIDTH - RIGHT,
    "bottom": HEIGHT - BOTTOM,
    "inset": INSET,
}
BINS = 240
MARKS = 11
"""Height of the strip above the depth chart where each format's non-finite values are marked."""


@dataclass(frozen=True)
class Tick:
    """A labelled position on an axis."""

    at: float
    text: str


@dataclass(frozen=True)
class Series:
    """One line of a chart. gone: positions whose value is not finite; dots: a path of isolated marks."""

    key: str
    label: str
    line: str
    dots: str
    gone: tuple[float, ...]


@dataclass(frozen=True)
class DepthChart:
    """Error against execution order. per_point: operations that one point stands for, the worst of them drawn."""

    series: tuple[Series, ...]
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    budget: float | None
    per_point: int
    first: tuple[int, ...]


@dataclass(frozen=True)
class Choice:
    """The point of a trade-off curve that the solver took."""

    x: float
    y: float
    title: str
    recommended: bool


@dataclass(frozen=True)
class Tradeoff:
    """Error against time over the plans the solver passed on its way."""

    series: tuple[Series, ...]
    choices: tuple[Choice, ...]
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    budget: float | None


def scale(low: float, high: float, start: float, end: float) -> Callable[[float], float]:
    """A linear map from data to pixels, clamped to its ends and rounded to a tenth of a pixel."""
    span = high - low or 1.0
    return lambda value: round(start + (end - start) * min(max((value - low) / span, 0.0), 1.0), 1)


def depth_chart(audit: Audit) -> DepthChart | None:
    """Local and propagated error of every operation in execution order, and that of a run under the recommended plan.

    None where nothing was measured.
    """
    nodes = [(i, r) for i, r in enumerate(audit.nodes) if any(e.local_error is not None for e in r.errors.values())]
    if not nodes:
        return None
    per_point = math.ceil(len(nodes) / BINS)
    bins = [nodes[i : i + per_point] for i in range(0, len(nodes), per_point)]
    curves = {f: ([_worst(b, f, True) for b in bins], [_worst(b, f, False) for b in bins]) for f in audit.formats}
    if audit.plan_errors:
        curves["plan"] = ([_planned(b, audit.plan_errors) for b in bins], [])
    decades = _decades([v for pair in curves.values() for curve in pair for v in curve] + [audit.max_error])
    x = scale(0, max(len(bins) - 1, 1), LEFT + INSET, WIDTH - RIGHT - INSET)
    y = scale(decades[0], decades[-1], HEIGHT - BOTTOM, TOP + MARKS * len(curves))
    series = tuple(
        Series(
            f,
            "recommended plan" if f == "plan" else label(f),
            _line((x(i), y(_log(v))) if v is not None and math.isfinite(v) else None for i, v in enumerate(spread)),
            _dots((x(i), y(_log(v))) for i, v in enumerate(local) if v is not None and math.isfinite(v)),
            tuple(x(i) for i, v in enumerate(spread) if v is not None and not math.isfinite(v)),
        )
        for f, (spread, local) in curves.items()
    )
    return DepthChart(
        series,
        tuple(Tick(x(i / per_point), f"{i:,}") for i in _round_steps(len(nodes) - 1)),
        _log_ticks(decades, y),
        y(_log(audit.max_error)),
        per_point,
        tuple(b[0][0] for b in bins),
    )


def _worst(nodes: Iterable[tuple[int, NodeReport]], fmt: str, propagated: bool) -> float | None:
    errors = [r.errors[fmt] for _, r in nodes if fmt in r.errors]
    values = [e.propagated_error if propagated else e.local_error for e in errors]
    known = [math.inf if math.isnan(v) else v for v in values if v is not None]
    return max(known, default=None)


def _planned(nodes: Iterable[tuple[int, NodeReport]], errors: Mapping[str, float]) -> float | None:
    return max((errors[r.node.name] for _, r in nodes if r.node.name in errors), default=None)


def _log(value: float) -> float:
    return math.log10(value) if value > 0 else -math.inf


def _decades(values: Iterable[float | None]) -> range:
    logs = [math.log10(v) for v in values if v is not None and math.isfinite(v) and v > 0] or [-4.0, 0.0]
    high = min(max(math.ceil(max(logs)), -1), 3)
    low = max(math.floor(min(logs)), high - 9)
    return range(low, max(high, low + 1) + 1)


def _log_ticks(decades: Sequence[int], y: Callable[[float], float]) -> tuple[Tick, ...]:
    return tuple(Tick(y(d), power(10, d)) for d in decades)


def _round_steps(last: int) -> list[int]:
    step = 10 ** max(int(math.log10(max(last, 1))), 0)
    step = next(s for s in (step // 5 or 1, step // 2 or 1, step, 2 * step) if last / s <= 6)
    return list(range(0, last + 1, step))


def _line(points: Iterable[tuple[float, float] | None]) -> str:
    path, pen_up = [], True
    for point in points:
        if point is None:
            pen_up = True
            continue
        path.append(f"{'M' if pen_up else 'L'}{point[0]:g} {point[1]:g}")
        pen_up = False
    return "".join(path)


def _dots(points: Iterable[tuple[float, float]]) -> str:
    return "".join(f"M{x:g} {y:g}h0" for x, y in points)


def tradeoff(audit: Audit) -> Tradeoff | None:
    """Every plan's curve of relative time against predicted error; None where no plan has one."""
    plans = [p for p in audit.plans.values() if p.pareto]
    if not plans:
        return None
    points = [point for plan in plans for point in (*plan.pareto, _chosen(plan))]
    times = [time for _, time in points if math.isfinite(time)]
    decades = _decades([error for error, _ in points] + [audit.max_error])
    low, high = min(times), max(max(times), min(times) + 0.05)
    x = scale(low, high, LEFT + INSET, WIDTH - RIGHT - INSET)
    y = scale(decades[0], decades[-1], HEIGHT - BOTTOM, TOP)
    return Tradeoff(
        tuple(_curve(plan, x, y) for plan in plans),
        tuple(_choice(plan, plan.name == audit.recommended, x, y) for plan in plans),
        tuple(Tick(x(low + (high - low) * k / 4), f"{low + (high - low) * k / 4:.2g}") for k in range(5)),
        _log_ticks(decades, y),
        y(_log(audit.max_error)),
    )


def _curve(plan: Plan, x: Callable[[float], float], y: Callable[[float], float]) -> Series:
    finite = sorted((time, error) for error, time in plan.pareto if math.isfinite(error) and math.isfinite(time))
    points = [(x(time), y(_log(error))) for time, error in finite]
    return Series(f"{plan.format} {plan.strategy}", plan_title(plan), _line(points), _dots(points), ())


def _choice(plan: Plan, recommended: bool, x: Callable[[float], float], y: Callable[[float], float]) -> Choice:
    error, time = _chosen(plan)
    return Choice(x(time), y(_log(error)), f"{plan_title(plan)}: {ratio(error)} at {time:.2f}", recommended)


def _chosen(plan: Plan) -> tuple[float, float]:
    """Predicted error and time of the plan itself, which need not lie on the solver's curve: later steps refine it."""
    return plan.predicted_error, 1 / plan.predicted_speedup
