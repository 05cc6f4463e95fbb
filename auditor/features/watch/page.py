"""Shows a replay on a terminal, and as one HTML page."""

from __future__ import annotations

import math
from collections.abc import Iterator

from ...report.blocks import Block, Code, Grid, Item, Prose, environment
from ...report.charts import line_chart, round_steps
from ...report.words import count, or_blank, percent, ratio
from .result import Outcome, Replay

HEADS = ("Recipe", "Result", "Loss", "Gradient error", "Updates lost", "Gradients zero")
CAPTION = (
    "One step from the state in the capsule. Gradient error: relative L2 difference from FP32 gradients. Updates lost: share of "
    "the non-zero updates that change no weight. Gradients zero: the largest share, of one parameter, that is zero but not in FP32."
)


def overview(result: Replay) -> list[Block]:
    """Blocks for the terminal: verdict, culprit, runs, and advice."""
    about = result.about
    where = f"{result.capsule}, step {about.step}" + (
        f", rank {about.rank} of {about.world}" if about.world > 1 else ""
    )
    return [
        Prose(f"Replay of {result.target}", (where,), "title"),
        Prose("Verdict", (result.verdict,), "good" if not result.is_reproduced else "error"),
        Prose("Advice", (result.advice,)),
        Grid(HEADS, tuple(_rows(result)), _best(result), texts=2, caption="Runs of the step"),
        Prose("Facts", result.facts, listed=True),
        *(Item(f"{one.kind}: {one.text} ({one.line})", (), "warning") for one in result.findings),
    ]


def render(result: Replay) -> str:
    """The replay as one HTML file."""
    about = result.about
    culprit = result.culprit
    state = [("Trigger", about.kind, about.text), ("Step", str(about.step), f"rank {about.rank} of {about.world}")]
    state += [("Loss scale", or_blank(about.scale, lambda x: f"{x:g}"), "")]
    state += [("Autocast", ", ".join(f"{key}: {value}" for key, value in about.autocast.items()), "")]
    state += [(name, value, "") for name, value in about.versions.items()]
    blame: list[Block] = []
    if culprit is not None:
        in_fp32 = "fails too" if result.fails_in_fp32 else "does not fail"
        rows = [("Operation", culprit.words), ("Line", culprit.line), ("Module", culprit.module or "")]
        rows += [("Cause", culprit.cause), ("FP32", in_fp32)]
        blame = [Grid(("", ""), tuple(row for row in rows if row[1]), texts=2)]
    plan: list[Block] = []
    if result.plan:
        lines = "\n".join(f"{path or '(whole model)'}: {precision}" for path, precision in result.plan.items())
        plan = [Code("Precision of the modules", lines)]
    return (
        environment()
        .get_template("replay.html.jinja")
        .render(
            result=result,
            headline=result.verdict,
            advice=result.advice,
            blame=blame,
            plan=plan,
            runs=[Grid(HEADS, tuple(_rows(result)), _best(result), texts=2), Prose("", (CAPTION,), "muted")],
            findings=result.findings,
            facts=result.facts,
            charts=list(_charts(result)),
            state=[Grid(("", "", ""), tuple(row for row in state if row[1]), texts=3)],
        )
    )


def _best(result: Replay) -> int | None:
    names = [one.name for one in result.outcomes]
    return names.index(result.repair) if result.repair else None


def _rows(result: Replay) -> Iterator[tuple[str, ...]]:
    for one in result.outcomes:
        yield (
            f"{one.title} (the training)" if one.name == result.recorded else one.title,
            _state(one),
            "NaN" if math.isnan(one.loss) else f"{one.loss:.5g}",
            or_blank(one.error, ratio),
            or_blank(one.lost, percent),
            or_blank(one.zero, percent),
        )


def _state(one: Outcome) -> str:
    where = f" at {one.culprit.words}" if one.culprit is not None else ""
    return f"{one.problem}{where}" if one.problem else "no problem"


def _charts(result: Replay) -> Iterator[Block]:
    """Loss and gradient norm of the steps before the capsule."""
    signals = result.about.signals
    if len(signals) < 2:
        return
    first, last = int(signals[0]["step"]), int(signals[-1]["step"])
    for name, title in (("loss", "Loss"), ("norm", "Norm of the gradients")):
        known = [(int(one["step"]) - first, one[name]) for one in signals]
        points = [(step, x) for step, x in known if isinstance(x, float) and math.isfinite(x) and x > 0]
        if len(points) > 1 and last > first:
            ticks = [(step, f"{step + first:,}") for step in round_steps(last - first)]
            about = (
                f"The last {count(len(signals), 'update')} before the capsule; values that are not finite are left out."
            )
            yield from line_chart(title, about, [("plan", title, points)], last - first, "step", ticks, linear=True)
