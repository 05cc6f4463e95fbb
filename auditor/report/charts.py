"""Charts of the report: plans, errors in execution order, curves by step, and gradients against the range of FP16."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from ..artefact.strategies import plan_title
from ..numerics.formats import FORMATS
from ..numerics.histogram import merge_magnitudes, significant, subnormal_share, underflow_share
from ..records import Magnitudes, NodeReport, Plan
from ..records.audit import Audit
from ..records.training import Training
from .blocks import BOTTOM, LEFT, RIGHT, WIDTH, Chart
from .words import label, percent, power

HEIGHT, TOP, INSET = 330, 12, 8
HEIGHT_OF_LINES = 260
BINS = 240
"""Maximum points of a curve. In a model with more operations, a point shows the worst of several operations."""
MARKS = 11
"""Height in pixels of the strip above the curves that marks the non-finite values of one format."""
LOWEST, HIGHEST = -48, 24
"""Exponents of two at the ends of the gradients' axis; a value beyond an end is drawn at that end."""
SMALL, HEIGHT_OF_PLANS = 560, 240
"""Pixels: width and height of the chart of plans, which fits a phone."""
BESIDE, LINE, DOT = 11, 18, 6
"""Pixels: distance of a name from its point, height of a name, and half the height of a point."""
SHIFTS = sorted(range(-120, 121, 6), key=abs)
"""Distances in pixels by which a name may be moved from the height of its point, the smallest first."""
LETTER = 9.0
"""Mean width of a letter of a name, in pixels."""
BANDS = (("over", "above the largest number"), ("subnormal", "subnormal"), ("zero", "lost to zero"))


def scale(low: float, high: float, start: float, end: float) -> Callable[[float], float]:
    """A linear map from data to pixels, clamped to its ends and rounded to a tenth of a pixel."""
    span = high - low or 1.0
    return lambda value: round(start + (end - start) * min(max((value - low) / span, 0.0), 1.0), 1)


def plan_chart(audit: Audit) -> Chart | None:
    """Error against speed-up of all plans, with the error budget; None without a plan that has both.

    A plan with non-finite outputs stands at the upper edge, and one that was not run at its predicted error.
    """
    placed = [point for plan in audit.plans.values() if (point := _point(plan)) is not None]
    if not any(math.isfinite(error) for _, error, _ in placed):
        return None
    speeds = [plan.speedup for plan, _, _ in placed]
    budget = audit.max_error
    powers = decades([*(error for _, error, _ in placed), budget], least=-9)
    step = next(step for step in (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, math.inf) if (max(speeds) - 1) / step <= 6)
    first = math.floor(min(1.0, *speeds) / step)
    last = max(math.ceil(max(speeds) / step), first + 1)
    right = SMALL - WIDTH + RIGHT
    x = scale(first * step, last * step, LEFT + INSET, right - INSET)
    y = scale(powers[0], powers[-1], HEIGHT_OF_PLANS - BOTTOM, TOP + LINE)
    limit = y(log(budget))
    noun = "share of a limit" if audit.criteria else "error"
    paths = [("band normal", f"M{LEFT} {limit}H{right}V{HEIGHT_OF_PLANS - BOTTOM}H{LEFT}z")]
    paths.append(("budget", f"M{LEFT} {limit}H{right}"))
    points = [(x(plan.speedup), y(log(error)) if math.isfinite(error) else TOP) for plan, error, _ in placed]
    names = [(LEFT + 6.0, limit - 6, "start", f"budget {budget:g}")]
    for (plan, error, note), (at, height) in zip(placed, points, strict=True):
        kind = plan.format if plan.format in ("fp16", "bf16") else "other"
        if math.isfinite(error):
            paths.append((f"mark {kind}{' predicted' * bool(note)}", f"M{at:g} {height:g}h0"))
        else:
            paths.append((f"gone {kind}", f"M{at - 4:g} {height - 4:g}l8 8m0-8l-8 8"))
        star = "* " * (plan.name == audit.recommended)
        words = f"{star}{plan_title(plan)}{f', {note}' if note else ''}"
        others = [point for point in points if point != (at, height)]
        names.append(_name_beside(at, height + 6, words, names, others))
    speed = "measured" if any(plan.measured_times for plan, _, _ in placed) else "predicted"
    about = (
        f"The measured {noun} of each plan, on a logarithmic scale, against its {speed} speed-up. "
        "Plans in the shaded area are within the budget. * recommended."
    )
    return Chart(
        "Error against speed-up",
        about,
        HEIGHT_OF_PLANS,
        tuple(paths),
        (),
        "speed-up over FP32",
        tuple((x(i * step), f"{i * step:g}x") for i in range(first, last + 1)),
        tuple((y(d), power(10, d)) for d in powers),
        names=tuple(names),
        width=SMALL,
    )


def _point(plan: Plan) -> tuple[Plan, float, str] | None:
    """(plan, error, a note on it); None for a plan that has no place in the chart: all FP32, failed, or of unknown speed."""
    ran = plan.verification
    idle = not plan.has_low and plan.program is None
    if idle or not math.isfinite(plan.speedup) or (ran is not None and ran.failure):
        return None
    if ran is None:
        known = math.isfinite(plan.predicted_error)
        return (plan, plan.predicted_error, "predicted") if known else None
    if ran.measured_error is None or not math.isfinite(ran.measured_error):
        return plan, math.inf, "non-finite"
    return plan, ran.measured_error, ""


Name = tuple[float, float, str, str]
"""x, y, SVG text-anchor and words of a name in a chart."""


def _name_beside(x: float, y: float, words: str, names: Iterable[Name], points: Iterable[tuple[float, float]]) -> Name:
    """A name on the left or right of its point, as near to the point's height as `names` and other points allow."""
    taken = [_box(name) for name in names]
    taken += [(left - DOT, left + DOT, height - DOT, height + DOT) for left, height in points]
    right: Name = (x + BESIDE, y, "start", words)
    left: Name = (x - BESIDE, y, "end", words)
    sides = (right, left) if x < SMALL / 2 else (left, right)
    for shift in SHIFTS:
        for at, height, anchor, _ in sides:
            name = (at, height + shift, anchor, words)
            first, last, top, bottom = _box(name)
            inside = first >= LEFT and last <= SMALL and top >= 0 and bottom <= HEIGHT_OF_PLANS - BOTTOM
            if inside and not any(a < last and first < b and c < bottom and top < d for a, b, c, d in taken):
                return name
    return sides[0]


def _box(name: Name) -> tuple[float, float, float, float]:
    """(left, right, top, bottom) of a name, in pixels."""
    x, y, anchor, words = name
    width = LETTER * len(words)
    left = x if anchor == "start" else x - width
    return left, left + width, y - LINE + 4, y + 4


def depth_chart(audit: Audit) -> Chart | None:
    """Local and propagated error of every operation in execution order, and errors under the recommended plan."""
    nodes = [(i, r) for i, r in enumerate(audit.nodes) if any(e.local_error is not None for e in r.errors.values())]
    if not nodes:
        return None
    per_point = math.ceil(len(nodes) / BINS)
    bins = [nodes[i : i + per_point] for i in range(0, len(nodes), per_point)]

    # {format: the largest error of each bin}; None for a bin without one
    carried = {fmt: [_worst(b, fmt, True) for b in bins] for fmt in audit.formats}
    made = {fmt: [_worst(b, fmt, False) for b in bins] for fmt in audit.formats}
    if audit.plan_errors:
        carried["plan"] = [_worst_under_plan(b, audit.plan_errors) for b in bins]
        made["plan"] = []
    budget = list[float]()
    if audit.max_error and not audit.criteria:  # a share of a criterion's limit has no place on this axis
        budget = [audit.max_error]

    shown = [error for fmt in carried for error in (*carried[fmt], *made[fmt])]
    powers = decades([*shown, *budget])
    x = scale(0, max(len(bins) - 1, 1), LEFT + INSET, RIGHT - INSET)
    y = scale(powers[0], powers[-1], HEIGHT - BOTTOM, TOP + MARKS * len(carried))
    paths = [("budget", f"M{LEFT} {y(log(most))}H{RIGHT}") for most in budget]
    for row, fmt in enumerate(carried):
        points = list[tuple[float, float] | None]()
        gone = list[float]()
        for i, error in enumerate(carried[fmt]):
            if error is not None and math.isfinite(error):
                points.append((x(i), y(log(error))))
                continue
            points.append(None)
            if error is not None:
                gone.append(x(i) - 2.5)
        dots = [(x(i), y(log(v))) for i, v in enumerate(made[fmt]) if v is not None and math.isfinite(v)]
        paths.append((f"dots {fmt}", "".join(f"M{a:g} {b:g}h0" for a, b in dots)))
        paths.append((f"line {fmt}", curve(points)))
        paths.append((f"gone {fmt}", "".join(f"M{a:g} {3 + MARKS * row}l5 5m0-5l-5 5" for a in gone)))

    legend = [(fmt, "recommended plan" if fmt == "plan" else label(fmt)) for fmt in carried]
    legend += [("budget", "budget")] * len(budget)
    if any(kind.startswith("gone") and path for kind, path in paths):
        legend.append(("gone", "× non-finite"))
    about = (
        "Relative error of each operation's result against FP32, on a logarithmic scale. Lines: accumulated error with the whole "
        "model in low precision, and under the recommended plan. Dots: local error, on inputs from the FP32 run. Click a point to see its operation in "
        "the table."
    )
    if per_point > 1:
        about += f" Each point is the worst of {per_point} consecutive operations."
    return Chart(
        "Error against depth",
        about,
        HEIGHT,
        tuple(paths),
        tuple(legend),
        "operation, in order",
        tuple((x(i / per_point), f"{i:,}") for i in round_steps(len(nodes) - 1)),
        tuple((y(d), power(10, d)) for d in powers),
        tuple(b[0][0] for b in bins),
        titled=False,
    )


def _worst_under_plan(nodes: Iterable[tuple[int, NodeReport]], errors: Mapping[str, float]) -> float | None:
    """The largest error of some operations under the recommended plan; None if none has one."""
    return max((errors[r.node.name] for _, r in nodes if r.node.name in errors), default=None)


def _worst(nodes: Iterable[tuple[int, NodeReport]], fmt: str, propagated: bool) -> float | None:
    errors = [r.errors[fmt] for _, r in nodes if fmt in r.errors]
    values = [e.propagated_error if propagated else e.local_error for e in errors]
    return max((math.inf if math.isnan(v) else v for v in values if v is not None), default=None)


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
    bottom = HEIGHT_OF_LINES - BOTTOM
    if linear and 0 < max(values) < 10 * min(values):
        marks = round_marks(min(values), max(values))
        y = scale(marks[0], marks[-1], bottom, TOP)
        y_ticks = [(y(mark), f"{mark:.6g}") for mark in marks]
    else:
        powers = decades(values, least)
        of_log = scale(powers[0], powers[-1], bottom, TOP)

        def y(value: float) -> float:
            return of_log(log(value))

        y_ticks = [(of_log(d), power(10, d)) for d in powers]
    yield Chart(
        label,
        about,
        HEIGHT_OF_LINES,
        tuple((f"line {style}", curve((x(a), y(b)) for a, b in points)) for style, _, points in curves),
        tuple((style, words) for style, words, _ in curves),
        x_title,
        tuple((x(at), words) for at, words in x_ticks),
        tuple(y_ticks),
    )


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
    path, pen_up = "", True
    for point in points:
        path += f"{'M' if pen_up else 'L'}{point[0]:g} {point[1]:g}" if point else ""
        pen_up = point is None
    return path


def gradient_chart(training: Training) -> Chart | None:
    """A histogram of the low-precision gradients against FP16's range, with and without the loss scale; None without
    nonzero ones."""
    spreads = [m.low for m in training.modules if m.low is not None]
    pool = merge_magnitudes([*spreads, *(significant(p.gradient) for p in training.parameters if p.low)])
    if not pool.nonzero:
        return None
    height = 230
    x = scale(LOWEST, HIGHEST + 1, LEFT, RIGHT)
    init = training.fp16.init if training.fp16 else None
    shift = round(math.log2(init)) if init else 0
    fp16 = FORMATS["fp16"]
    stops = (LOWEST, fp16.min_exponent - fp16.mantissa, fp16.min_exponent, math.log2(fp16.largest), HIGHEST + 1)
    bands = zip(("zero", "subnormal", "normal", "over"), map(x, stops), map(x, stops[1:]), strict=False)
    paths = [(f"band {kind}", f"M{low:g} {TOP}H{high:g}V{height - BOTTOM}H{low:g}z") for kind, low, high in bands]
    paths.append(("gradient-plain", _staircase(pool, 0, x, height)))
    legend = [("gradient-plain", "without a loss scale")]
    if init is not None and init != 1:
        paths.append(("gradient-scaled", _staircase(pool, shift, x, height)))
        legend.append(("gradient-scaled", f"scaled by {init:,.10g}"))
    shares = (share(pool.exponents, fp16, by) for by in (0, shift) for share in (underflow_share, subnormal_share))
    zero, small, *scaled = map(percent, shares)
    after = "" if init is None else f"; with a loss scale of {init:,.10g}, these shares are {' and '.join(scaled)}"
    about = (
        f"Without a loss scale, {zero} of the low-precision gradient values become zero in FP16, and {small} become subnormal"
        f"{after}."
    )
    return Chart(
        "Gradients against the range of FP16",
        f"{about} Heights show shares of the gradient values, on a square-root scale.",
        height,
        tuple(paths),
        (*legend, *BANDS),
        "magnitude of a gradient",
        tuple((x(e), power(2, e)) for e in (-40, -32, -24, -14, 0, 16)),
    )


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
