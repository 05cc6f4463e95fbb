"""Charts of the report: plans, errors in execution order, and curves by step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from ..artefact.strategies import plan_title
from ..records import NodeReport, Plan
from ..records.audit import Audit
from .blocks import BOTTOM, LEFT, RIGHT, WIDTH, Chart
from .words import label, power

HEIGHT, TOP, INSET = 330, 12, 8
HEIGHT_OF_LINES = 260
BINS = 240
"""Maximum points of a curve. In a model with more operations, a point shows the worst of several operations."""
MARKS = 11
"""Height in pixels of the strip above the curves that marks the non-finite values of one format."""
SMALL, HEIGHT_OF_PLANS = 560, 240
"""Pixels: width and height of the chart of plans, which fits a phone."""
BESIDE, LINE, DOT = 11, 18, 6
"""Pixels: distance of a name from its point, height of a name, and half the height of a point."""
SHIFTS = sorted(range(-120, 121, 6), key=abs)
"""Distances in pixels by which a name may be moved from the height of its point, the smallest first."""
LETTER = 9.0
"""Mean width of a letter of a name, in pixels."""


def scale(low: float, high: float, start: float, end: float) -> Callable[[float], float]:
    """A linear map from data to pixels, clamped to its ends and rounded to a tenth of a pixel."""
    span = high - low or 1.0
    return lambda value: round(start + (end - start) * min(max((value - low) / span, 0.0), 1.0), 1)


def plan_chart(audit: Audit) -> Chart | None:
    """Error against speed-up of all plans, with the error budget; None without a plan that has both.

    A plan with non-finite outputs stands at the upper edge, and one that was not run at its predicted error.
    """
    placed = _placed_plans(audit)
    finite = [place.error for place in placed if math.isfinite(place.error)]
    if not finite:
        return None
    budget = audit.max_error
    powers = decades([*finite, budget], least=-9)
    step, ticks = _speed_ticks([place.plan.speedup for place in placed])

    # From speed-ups and errors to pixels.
    right = SMALL - WIDTH + RIGHT
    bottom = HEIGHT_OF_PLANS - BOTTOM
    x = scale(ticks[0] * step, ticks[-1] * step, LEFT + INSET, right - INSET)
    y = scale(powers[0], powers[-1], bottom, TOP + LINE)
    points = list[tuple[float, float]]()
    for place in placed:
        height = y(log(place.error)) if math.isfinite(place.error) else TOP
        points.append((x(place.plan.speedup), height))
    limit = y(log(budget))

    paths = [("band normal", f"M{LEFT} {limit}H{right}V{bottom}H{LEFT}z")]
    paths.append(("budget", f"M{LEFT} {limit}H{right}"))
    names: list[Name] = [(LEFT + 6.0, limit - 6, "start", f"budget {budget:g}")]
    for place, point in zip(placed, points, strict=True):
        paths.append(_plan_mark(place, *point))
        words = _plan_words(place, audit.recommended)
        others = [other for other in points if other != point]
        names.append(_name_beside(point[0], point[1] + 6, words, names, others))
    return Chart(
        "Error against speed-up",
        _about_plans(audit, placed),
        HEIGHT_OF_PLANS,
        tuple(paths),
        (),
        "speed-up over FP32",
        tuple((x(tick * step), f"{tick * step:g}x") for tick in ticks),
        tuple((y(exponent), power(10, exponent)) for exponent in powers),
        names=tuple(names),
        width=SMALL,
    )


class PlacedPlan(NamedTuple):
    """A plan that has a place in the chart of plans. note: what differs from a measured, finite error."""

    plan: Plan
    error: float
    note: str


def _placed_plans(audit: Audit) -> list[PlacedPlan]:
    """The plans of an audit that have a place in the chart, in order."""
    placed = [_place(plan) for plan in audit.plans.values()]
    return [place for place in placed if place is not None]


def _speed_ticks(speeds: Sequence[float]) -> tuple[float, range]:
    """The distance of two ticks on the axis of speed-ups, and the ticks as multiples of this distance."""
    gain = max(speeds) - 1
    step = next(step for step in (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, math.inf) if gain / step <= 6)
    first = math.floor(min(1.0, *speeds) / step)
    last = max(math.ceil(max(speeds) / step), first + 1)
    return step, range(first, last + 1)


def _plan_mark(place: PlacedPlan, x: float, y: float) -> tuple[str, str]:
    """(CSS classes, SVG path) of a plan's point: a dot, or a cross for non-finite outputs."""
    kind = place.plan.format if place.plan.format in ("fp16", "bf16") else "other"
    if not math.isfinite(place.error):
        return f"gone {kind}", f"M{x - 4:g} {y - 4:g}l8 8m0-8l-8 8"
    style = f"mark {kind}"
    if place.note:
        style += " predicted"
    return style, f"M{x:g} {y:g}h0"


def _plan_words(place: PlacedPlan, recommended: str | None) -> str:
    """The words beside a plan's point."""
    words = plan_title(place.plan)
    if place.plan.name == recommended:
        words = f"* {words}"
    if place.note:
        words += f", {place.note}"
    return words


def _about_plans(audit: Audit, placed: Iterable[PlacedPlan]) -> str:
    noun = "share of a limit" if audit.criteria else "error"
    speed = "measured" if any(place.plan.measured_times for place in placed) else "predicted"
    return (
        f"The measured {noun} of each plan, on a logarithmic scale, against its {speed} speed-up. "
        "Plans in the shaded area are within the budget. * recommended."
    )


def _place(plan: Plan) -> PlacedPlan | None:
    """The place of a plan; None for a plan that has no place in the chart: all FP32, failed, or of unknown speed."""
    is_idle = not plan.has_low and plan.program is None
    if is_idle or not math.isfinite(plan.speedup):
        return None
    verification = plan.verification
    if verification is None:
        if not math.isfinite(plan.predicted_error):
            return None
        return PlacedPlan(plan, plan.predicted_error, "predicted")
    if verification.failure:
        return None
    error = verification.measured_error
    if error is None or not math.isfinite(error):
        return PlacedPlan(plan, math.inf, "non-finite")
    return PlacedPlan(plan, error, "")


Name = tuple[float, float, str, str]
"""x, y, SVG text-anchor and words of a name in a chart."""


def _name_beside(x: float, y: float, words: str, names: Iterable[Name], points: Iterable[tuple[float, float]]) -> Name:
    """A name on the left or right of its point, as near to the point's height as `names` and other points allow."""
    taken = [_box(name) for name in names]
    for left, height in points:
        taken.append((left - DOT, left + DOT, height - DOT, height + DOT))
    at_right: Name = (x + BESIDE, y, "start", words)
    at_left: Name = (x - BESIDE, y, "end", words)
    sides = (at_right, at_left) if x < SMALL / 2 else (at_left, at_right)
    for shift in SHIFTS:
        for start, height, anchor, _ in sides:
            name = (start, height + shift, anchor, words)
            box = _box(name)
            if _is_inside(box) and not any(_overlap(box, other) for other in taken):
                return name
    return sides[0]


Box = tuple[float, float, float, float]
"""(left, right, top, bottom), in pixels."""


def _is_inside(box: Box) -> bool:
    """Whether a box lies in the area of the chart of plans."""
    left, right, top, bottom = box
    return left >= LEFT and right <= SMALL and top >= 0 and bottom <= HEIGHT_OF_PLANS - BOTTOM


def _overlap(box: Box, other: Box) -> bool:
    left, right, top, bottom = box
    other_left, other_right, other_top, other_bottom = other
    beside = other_left < right and left < other_right
    return beside and other_top < bottom and top < other_bottom


def _box(name: Name) -> Box:
    """The area that a name covers."""
    x, y, anchor, words = name
    width = LETTER * len(words)
    left = x if anchor == "start" else x - width
    return left, left + width, y - LINE + 4, y + 4


def depth_chart(audit: Audit) -> Chart | None:
    """Local and propagated error of every operation in execution order, and errors under the recommended plan."""
    nodes = [(row, report) for row, report in enumerate(audit.nodes) if _has_local_error(report)]
    if not nodes:
        return None
    per_point = math.ceil(len(nodes) / BINS)
    bins = [nodes[start : start + per_point] for start in range(0, len(nodes), per_point)]
    carried, made = _errors_of_bins(audit, bins)
    budget = list[float]()
    if audit.max_error and not audit.criteria:  # a share of a criterion's limit has no place on this axis
        budget = [audit.max_error]

    # From bins and errors to pixels.
    shown: list[float | None] = [*budget]
    for errors in (*carried.values(), *made.values()):
        shown += errors
    powers = decades(shown)
    x = scale(0, max(len(bins) - 1, 1), LEFT + INSET, RIGHT - INSET)
    y = scale(powers[0], powers[-1], HEIGHT - BOTTOM, TOP + MARKS * len(carried))

    paths = [("budget", f"M{LEFT} {y(log(most))}H{RIGHT}") for most in budget]
    for strip, fmt in enumerate(carried):
        paths += _paths_of_format(fmt, carried[fmt], made[fmt], x, y, 3 + MARKS * strip)
    return Chart(
        "Error against depth",
        _about_depth(per_point),
        HEIGHT,
        tuple(paths),
        _depth_legend(carried, paths, has_budget=bool(budget)),
        "operation, in order",
        tuple((x(row / per_point), f"{row:,}") for row in round_steps(len(nodes) - 1)),
        tuple((y(exponent), power(10, exponent)) for exponent in powers),
        tuple(operations[0][0] for operations in bins),
        titled=False,
    )


Errors = dict[str, list[float | None]]
"""{format, or "plan": the largest error of each bin}; None for a bin without one."""


def _has_local_error(report: NodeReport) -> bool:
    return any(error.local_error is not None for error in report.errors.values())


def _errors_of_bins(audit: Audit, bins: Sequence[Sequence[tuple[int, NodeReport]]]) -> tuple[Errors, Errors]:
    """The propagated and the local errors. The plan has no local ones."""
    carried = Errors()
    made = Errors()
    for fmt in audit.formats:
        carried[fmt] = [_worst(operations, fmt, True) for operations in bins]
        made[fmt] = [_worst(operations, fmt, False) for operations in bins]
    if audit.plan_errors:
        carried["plan"] = [_worst_under_plan(operations, audit.plan_errors) for operations in bins]
        made["plan"] = []
    return carried, made


def _paths_of_format(
    fmt: str,
    carried: Iterable[float | None],
    made: Iterable[float | None],
    x: Callable[[float], float],
    y: Callable[[float], float],
    top: int,
) -> list[tuple[str, str]]:
    """(CSS classes, SVG path) of one format: local errors as dots, propagated errors as a line, non-finite ones as
    crosses in the strip that starts at height `top`."""
    dots = ""
    for at, error in enumerate(made):
        if error is not None and math.isfinite(error):
            dots += f"M{x(at):g} {y(log(error)):g}h0"
    points = list[tuple[float, float] | None]()
    crosses = ""
    for at, error in enumerate(carried):
        if error is not None and math.isfinite(error):
            points.append((x(at), y(log(error))))
            continue
        points.append(None)  # a gap in the line
        if error is not None:
            crosses += f"M{x(at) - 2.5:g} {top}l5 5m0-5l-5 5"
    return [(f"dots {fmt}", dots), (f"line {fmt}", curve(points)), (f"gone {fmt}", crosses)]


def _depth_legend(
    formats: Iterable[str], paths: Iterable[tuple[str, str]], *, has_budget: bool
) -> tuple[tuple[str, str], ...]:
    """(CSS class, words) of what the chart of errors shows."""
    legend = list[tuple[str, str]]()
    for fmt in formats:
        words = "recommended plan" if fmt == "plan" else label(fmt)
        legend.append((fmt, words))
    if has_budget:
        legend.append(("budget", "budget"))
    if any(style.startswith("gone") and path for style, path in paths):
        legend.append(("gone", "× non-finite"))
    return tuple(legend)


def _about_depth(per_point: int) -> str:
    about = (
        "Relative error of each operation's result against FP32, on a logarithmic scale. "
        "Lines: accumulated error with the whole model in low precision, and under the recommended plan. "
        "Dots: local error, on inputs from the FP32 run. Click a point to see its operation in the table."
    )
    if per_point > 1:
        about += f" Each point is the worst of {per_point} consecutive operations."
    return about


def _worst_under_plan(nodes: Iterable[tuple[int, NodeReport]], errors: Mapping[str, float]) -> float | None:
    """The largest error of some operations under the recommended plan; None if none has one."""
    return max((errors[r.node.name] for _, r in nodes if r.node.name in errors), default=None)


def _worst(nodes: Iterable[tuple[int, NodeReport]], fmt: str, propagated: bool) -> float | None:
    """The largest propagated or local error of some operations in a format, inf for NaN; None if none has one."""
    largest = None
    for _, report in nodes:
        error = report.errors.get(fmt)
        if error is None:
            continue
        value = error.propagated_error if propagated else error.local_error
        if value is None:
            continue
        if math.isnan(value):
            return math.inf
        largest = value if largest is None else max(largest, value)
    return largest


def line_chart(
    label: str,
    about: str,
    curves: Sequence[tuple[str, str, Sequence[tuple[float, float]]]],
    last: float,
    x_title: str,
    x_ticks: Iterable[tuple[float, str]],
    least: int = -1,
    linear: bool = False,
) -> Iterator[Chart]:
    """A chart with a logarithmic vertical axis; no chart without points. curves: (CSS class, words, points).

    last: right end of the horizontal axis. least: the vertical axis reaches at least 10^least. linear: whether the axis
    is linear if the values span less than a power of ten.
    """
    values = [value for _, _, points in curves for _, value in points]
    if not values:
        return
    x = scale(0, last, LEFT + INSET, RIGHT - INSET)
    if linear and 0 < max(values) < 10 * min(values):
        y, y_ticks = _linear_axis(values)
    else:
        y, y_ticks = _logarithmic_axis(values, least)
    paths = list[tuple[str, str]]()
    for style, _, points in curves:
        path = curve((x(at), y(value)) for at, value in points)
        paths.append((f"line {style}", path))
    yield Chart(
        label,
        about,
        HEIGHT_OF_LINES,
        tuple(paths),
        tuple((style, words) for style, words, _ in curves),
        x_title,
        tuple((x(at), words) for at, words in x_ticks),
        tuple(y_ticks),
    )


Axis = tuple[Callable[[float], float], list[tuple[float, str]]]
"""A vertical axis: the map from data to pixels, and the ticks as (pixels, words)."""


def _linear_axis(values: Sequence[float]) -> Axis:
    marks = round_marks(min(values), max(values))
    y = scale(marks[0], marks[-1], HEIGHT_OF_LINES - BOTTOM, TOP)
    return y, [(y(mark), f"{mark:.6g}") for mark in marks]


def _logarithmic_axis(values: Sequence[float], least: int) -> Axis:
    powers = decades(values, least)
    of_log = scale(powers[0], powers[-1], HEIGHT_OF_LINES - BOTTOM, TOP)

    def y(value: float) -> float:
        return of_log(log(value))

    return y, [(of_log(exponent), power(10, exponent)) for exponent in powers]


def log(value: float) -> float:
    return math.log10(value) if value > 0 else -math.inf


def decades(values: Iterable[float | None], least: int = -1) -> range:
    """Exponents of the powers of ten on an axis for `values`. The upper end is 10^least or more."""
    logs = [math.log10(v) for v in values if v is not None and math.isfinite(v) and v > 0] or [-4.0, 0.0]
    high = min(max(math.ceil(max(logs)), least), 3)
    low = max(math.floor(min(logs)), high - 9)
    return range(low, max(high, low + 1) + 1)


def round_steps(last: int) -> list[int]:
    step = 10 ** max(int(math.log10(max(last, 1))), 0)
    step = next(s for s in (step // 5 or 1, step // 2 or 1, step, 2 * step) if last / s <= 6)
    return list(range(0, last + 1, step))


def round_marks(low: float, high: float) -> list[float]:
    """Two to seven round numbers at equal distances, the first at most `low` and the last at least `high`."""
    span = (high - low) or abs(high) or 1.0
    unit = 10.0 ** math.floor(math.log10(span))
    step = next(size * unit for size in (0.2, 0.5, 1.0, 2.0, 5.0) if span / (size * unit) <= 5)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [mark * step for mark in range(first, max(last, first + 1) + 1)]


def curve(points: Iterable[tuple[float, float] | None]) -> str:
    """The SVG path of a line through points, with a gap at each None."""
    path = ""
    pen_up = True
    for point in points:
        if point is not None:
            command = "M" if pen_up else "L"
            path += f"{command}{point[0]:g} {point[1]:g}"
        pen_up = point is None
    return path
