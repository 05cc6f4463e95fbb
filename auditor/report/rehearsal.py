"""Renders a rehearsal, for a terminal and as an HTML file without external resources."""

from __future__ import annotations

import math
from collections.abc import Iterator

from ..rehearsal.remedies import code_of
from ..rehearsal.result import RecipeProblem, RecipeRun, Rehearsal
from .blocks import BOTTOM, LEFT, RIGHT, Block, Chart, Code, Entries, Fold, Grid, Item, Prose, Title, environment
from .charts import TOP, curve, decades, log, round_steps, scale
from .words import count, percent, power, ratio

HEIGHT, POINTS, WORST = 260, 120, 12
"""Pixels of a chart, points of a curve, and parameters in a table."""
SHARES = (
    ("unchanged", "Updates lost"),
    ("decay_lost", "Decay lost"),
    ("second_moment_stuck", "2nd moment stuck"),
)


def overview(found: Rehearsal) -> list[Block]:
    """Verdict, recipes, and problems with their remedies."""
    about = (
        f"{count(found.steps, 'step')} of {found.target} in each recipe, on {count(found.batches, 'batch', 'batches')}"
    )
    page: list[Block] = [
        Title(f"Rehearsal of {found.target}", about),
        Prose("Verdict", (found.recommendation,), "good" if found.recommended != "fp32" else "error"),
    ]
    entries = [_entry(found, problem) for problem in found.problems if not found.runs[problem.recipe].recipe.repairs]
    said = (
        f"{count(len(entries), 'problem')} in recipes that are not recommended"
        if entries
        else "No recipe has a problem."
    )
    page += [_table(found), Entries("Problems", said, tuple(entries))]
    if zero := _always_zero(found):
        page.append(Prose("Gradients", (zero,)))
    noise = found.runs["fp32"].late(found.runs["fp32"].noise)
    if noise is not None:
        text = f"FP32's own gradients differ by {percent(noise)} between batches; much smaller errors matter less."
        page.append(Prose("Noise", (text,)))
    emulated = (
        f"A CPU emulated a GPU. Problems that need more than {count(found.steps, 'step')} to appear are not detected."
    )
    return [*page, Prose("Caution", (emulated,), "warning")]


def render(found: Rehearsal) -> str:
    """The rehearsal as one HTML file, with loss curves, remedies to paste and parameters."""
    page = [*overview(found)[1:], *_charts(found), *_remedies(found), *_parameters(found)]
    title = f"Rehearsal of {found.target}"
    return environment().get_template("diff.html.jinja").render(title=title, headline=title, page=page)


def _table(found: Rehearsal) -> Grid:
    heads = ("Recipe", "Last loss", "Skipped", "Gradient error", *(head for _, head in SHARES), "")
    rows = tuple(_row(found, name, run) for name, run in found.runs.items())
    return Grid(heads, rows, list(found.runs).index(found.recommended), caption="Recipes, late in the run")


def _row(found: Rehearsal, name: str, run: RecipeRun) -> tuple[str, ...]:
    broken = sum(problem.recipe == name for problem in found.problems)
    verdict = (
        "recommended"
        if name == found.recommended
        else count(broken, "problem")
        if broken
        else "holds" * (name != "fp32")
    )
    if run.failure is not None:
        return (run.recipe.title, "failed", *[""] * (len(SHARES) + 2), verdict)
    shares = (percent(share) if (share := run.share(what)) is not None else "" for what, _ in SHARES)
    loss = f"{run.last_loss():.4g}"
    return (
        run.recipe.title,
        loss,
        f"{len(run.skipped)}",
        ratio(run.late(run.errors)) if run.errors and name != "fp32" else "",
        *shares,
        verdict,
    )


def _entry(found: Rehearsal, problem: RecipeProblem) -> Item:
    run = found.runs[problem.recipe]
    notes = []
    for name, other in found.runs.items():
        if other.recipe.repairs == problem.recipe:
            left = [p for p in found.problems if p.recipe == name and p.kind == problem.kind]
            effect = f"still: {left[0].text}" if left else f"repairs it; its loss ends at {other.last_loss():.4g}"
            notes.append(f"{other.recipe.title}: {effect}.")
    return Item(f"{run.recipe.title}: {problem.kind}: {problem.text}", tuple(notes), "warning")


def _always_zero(found: Rehearsal) -> str:
    """A sentence on parameters that never received a gradient."""
    rows = found.runs["fp32"].parameters
    names = [name for name, row in rows.items() if row.zero_gradient and all(share == 1 for share in row.zero_gradient)]
    if not names:
        return ""
    return (
        "Gradients that were zero in every sampled step: "
        f"{', '.join(names[:4])}{f' and {len(names) - 4} more' if names[4:] else ''}."
    )


def _charts(found: Rehearsal) -> Iterator[Chart]:
    shown = {name: run for name, run in found.runs.items() if not run.recipe.repairs or name == found.recommended}
    losses = {name: run.losses for name, run in shown.items()}
    steps = list(range(found.steps))
    text = (
        "Loss of every recipe on the same batches, from the same weights, logarithmic. Each "
        "point is a mean over neighbouring steps."
    )
    yield from _chart("Loss", text, found, losses, dict.fromkeys(losses, steps))
    errors = {name: run.errors for name, run in shown.items() if name != "fp32"} | {"noise": found.runs["fp32"].noise}
    at = {name: found.runs["fp32" if name == "noise" else name].steps for name in errors}
    text = (
        "Relative error of all gradients against FP32's at the same weights. Noise: the "
        "difference between gradients of two batches."
    )
    yield from _chart("Gradient error", text, found, errors, at)


def _chart(
    label: str,
    about: str,
    found: Rehearsal,
    curves: dict[str, list[float]] | dict[str, list[float | None]],
    at: dict[str, list[int]],
) -> Iterator[Chart]:
    each = {name: _average_bins(values, at[name], found.steps) for name, values in curves.items()}
    powers = [v for points in each.values() for _, v in points]
    if not powers:
        return
    ticks = decades(powers)
    x, y = scale(0, max(found.steps - 1, 1), LEFT + 8, RIGHT - 8), scale(ticks[0], ticks[-1], HEIGHT - BOTTOM, TOP)
    paths = tuple(
        (f"line {_style(found, name)}", curve((x(s), y(log(v))) for s, v in points)) for name, points in each.items()
    )
    legend = tuple(
        (_style(found, name), found.runs[name].recipe.title if name in found.runs else "noise") for name in each
    )
    marks = tuple((x(s), f"{s:,}") for s in round_steps(found.steps - 1))
    yield Chart(label, about, HEIGHT, paths, legend, "step", marks, tuple((y(d), power(10, d)) for d in ticks))


def _average_bins(values: list[float] | list[float | None], at: list[int], steps: int) -> list[tuple[float, float]]:
    width = max(math.ceil(steps / POINTS), 1)
    bins: dict[int, list[float]] = {}
    for step, value in zip(at, values, strict=False):
        if value is not None and math.isfinite(value) and value > 0:
            bins.setdefault(step // width, []).append(value)
    return [(index * width + (width - 1) / 2, sum(each) / len(each)) for index, each in sorted(bins.items())]


def _style(found: Rehearsal, name: str) -> str:
    if name not in found.runs or name == "fp32":
        return "budget" if name == "noise" else "plan"
    recipe = found.runs[name].recipe
    return f"{recipe.format}{' cast' if recipe.stored or recipe.scopes else ''}"


def _remedies(found: Rehearsal) -> Iterator[Block]:
    names = [name for name, run in found.runs.items() if run.recipe.remedies and name in found.holding]
    for name in dict.fromkeys(remedy for each in names for remedy in found.runs[each].recipe.remedies):
        yield Fold(f"The code of {name.replace('_', ' ').replace('fp32', 'FP32')}", (Code("", code_of(name)),))


def _parameters(found: Rehearsal) -> Iterator[Fold]:
    """The parameters with the largest errors in a recipe."""
    for run in found.runs.values():
        if run.recipe.name == "fp32" or run.recipe.repairs or not run.steps:
            continue

        def harm(item: str, run: RecipeRun = run) -> float:
            row = run.parameters[item]
            return max(
                (
                    run.late(series) or 0.0
                    for series in (row.error, row.unchanged, row.decay_lost, row.second_moment_stuck)
                ),
                default=0.0,
            )

        worst = sorted(run.parameters, key=harm, reverse=True)[:WORST]
        rows = []
        for name in worst:
            row = run.parameters[name]
            noise = found.runs["fp32"].parameters[name].noise
            cells = [
                percent(v) if (v := run.late(getattr(row, what))) is not None else ""
                for what in ("zero_gradient", *(w for w, _ in SHARES))
            ]
            rows.append((name, ratio(run.late(row.error)), ratio(run.late(noise)), *cells))
        heads = ("Parameter", "Gradient error", "Noise", "Gradient zero", *(head for _, head in SHARES))
        left = f"; {len(run.parameters) - WORST} more in rehearsal.json" if len(run.parameters) > WORST else ""
        yield Fold(
            f"Parameters in {run.recipe.title}: {count(len(worst), 'worst', 'worst')}{left}",
            (Grid(heads, tuple(rows)),),
        )
