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


def overview(result: Rehearsal) -> list[Block]:
    """Verdict, recipes, and problems with their remedies."""
    about = f"{count(result.steps, 'step')} of {result.target} in each recipe, on {count(result.batches, 'batch', 'batches')}"
    page: list[Block] = [
        Title(f"Rehearsal of {result.target}", about),
        Prose("Verdict", (result.recommendation,), "good" if result.recommended != "fp32" else "error"),
    ]
    entries = [_entry(result, problem) for problem in result.problems if not result.runs[problem.recipe].recipe.repairs]
    said = (
        f"{count(len(entries), 'problem')} in recipes that are not recommended"
        if entries
        else "No recipe has a problem."
    )
    page += [_table(result), Entries("Problems", said, tuple(entries))]
    if zero := _always_zero(result):
        page.append(Prose("Gradients", (zero,)))
    noise = result.runs["fp32"].late(result.runs["fp32"].noise)
    if noise is not None:
        text = f"FP32's own gradients differ by {percent(noise)} between batches; much smaller errors matter less."
        page.append(Prose("Noise", (text,)))
    emulated = f"A CPU emulated a GPU. Problems that appear after {count(result.steps, 'step')} are not detected."
    return [*page, Prose("Caution", (emulated,), "warning")]


def render(result: Rehearsal) -> str:
    """The rehearsal as one HTML file, with loss curves, remedies to paste and parameters."""
    page = [*overview(result)[1:], *_charts(result), *_remedies(result), *_parameters(result)]
    title = f"Rehearsal of {result.target}"
    return environment().get_template("diff.html.jinja").render(title=title, headline=title, page=page)


def _table(result: Rehearsal) -> Grid:
    heads = ("Recipe", "Last loss", "Skipped", "Gradient error", *(head for _, head in SHARES), "")
    rows = tuple(_row(result, name, run) for name, run in result.runs.items())
    return Grid(heads, rows, list(result.runs).index(result.recommended), caption="Recipes, late in the run")


def _row(result: Rehearsal, name: str, run: RecipeRun) -> tuple[str, ...]:
    broken = sum(problem.recipe == name for problem in result.problems)
    verdict = (
        "recommended"
        if name == result.recommended
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


def _entry(result: Rehearsal, problem: RecipeProblem) -> Item:
    run = result.runs[problem.recipe]
    notes = []
    for name, other in result.runs.items():
        if other.recipe.repairs == problem.recipe:
            left = [p for p in result.problems if p.recipe == name and p.kind == problem.kind]
            effect = f"still: {left[0].text}" if left else f"repairs it; its loss ends at {other.last_loss():.4g}"
            notes.append(f"{other.recipe.title}: {effect}.")
    return Item(f"{run.recipe.title}: {problem.kind}: {problem.text}", tuple(notes), "warning")


def _always_zero(result: Rehearsal) -> str:
    """A sentence on parameters that never received a gradient."""
    rows = result.runs["fp32"].parameters
    names = [name for name, row in rows.items() if row.zero_gradient and all(share == 1 for share in row.zero_gradient)]
    if not names:
        return ""
    return (
        "Gradients that were zero in every sampled step: "
        f"{', '.join(names[:4])}{f' and {len(names) - 4} more' if names[4:] else ''}."
    )


def _charts(result: Rehearsal) -> Iterator[Chart]:
    shown = {name: run for name, run in result.runs.items() if not run.recipe.repairs or name == result.recommended}
    losses = {name: run.losses for name, run in shown.items()}
    steps = list(range(result.steps))
    text = "Loss of every recipe on the same batches, logarithmic; each point averages neighboring steps."
    yield from _chart("Loss", text, result, losses, dict.fromkeys(losses, steps))
    errors = {name: run.errors for name, run in shown.items() if name != "fp32"} | {"noise": result.runs["fp32"].noise}
    at = {name: result.runs["fp32" if name == "noise" else name].steps for name in errors}
    text = "Relative error of all gradients against FP32's at equal weights. Noise: between two batches."
    yield from _chart("Gradient error", text, result, errors, at)


def _chart(
    label: str,
    about: str,
    result: Rehearsal,
    curves: dict[str, list[float]] | dict[str, list[float | None]],
    at: dict[str, list[int]],
) -> Iterator[Chart]:
    each = {name: _average_bins(values, at[name], result.steps) for name, values in curves.items()}
    powers = [v for points in each.values() for _, v in points]
    if not powers:
        return
    ticks = decades(powers)
    x, y = scale(0, max(result.steps - 1, 1), LEFT + 8, RIGHT - 8), scale(ticks[0], ticks[-1], HEIGHT - BOTTOM, TOP)
    paths = tuple(
        (f"line {_style(result, name)}", curve((x(s), y(log(v))) for s, v in points)) for name, points in each.items()
    )
    legend = tuple(
        (_style(result, name), result.runs[name].recipe.title if name in result.runs else "noise") for name in each
    )
    marks = tuple((x(s), f"{s:,}") for s in round_steps(result.steps - 1))
    yield Chart(label, about, HEIGHT, paths, legend, "step", marks, tuple((y(d), power(10, d)) for d in ticks))


def _average_bins(values: list[float] | list[float | None], at: list[int], steps: int) -> list[tuple[float, float]]:
    width = max(math.ceil(steps / POINTS), 1)
    bins: dict[int, list[float]] = {}
    for step, value in zip(at, values, strict=False):
        if value is not None and math.isfinite(value) and value > 0:
            bins.setdefault(step // width, []).append(value)
    return [(index * width + (width - 1) / 2, sum(each) / len(each)) for index, each in sorted(bins.items())]


def _style(result: Rehearsal, name: str) -> str:
    if name not in result.runs or name == "fp32":
        return "budget" if name == "noise" else "plan"
    recipe = result.runs[name].recipe
    return f"{recipe.format}{' cast' if recipe.stored or recipe.scopes else ''}"


def _remedies(result: Rehearsal) -> Iterator[Block]:
    names = [name for name, run in result.runs.items() if run.recipe.remedies and name in result.holding]
    for name in dict.fromkeys(remedy for each in names for remedy in result.runs[each].recipe.remedies):
        yield Fold(
            f"The code of {name.replace('_', ' ').replace('fp32', 'FP32').replace('kahan', 'Kahan')}",
            (Code("", code_of(name)),),
        )


def _parameters(result: Rehearsal) -> Iterator[Fold]:
    """The parameters that some recipe treats worst, the worst first."""
    kinds = ("error", *(kind for kind, _ in SHARES))
    rows: list[tuple[float, tuple[str, ...]]] = []
    for run in result.runs.values():
        for name, row in run.parameters.items() if run.recipe.name != "fp32" and not run.recipe.repairs else ():
            late = {kind: run.late(getattr(row, kind)) for kind in (*kinds, "zero_gradient")}
            cells = tuple("" if one is None else percent(one) for one in late.values())
            noise = ratio(result.runs["fp32"].late(result.runs["fp32"].parameters[name].noise))
            rows.append((max(late[kind] or 0.0 for kind in kinds), (name, run.recipe.title, noise, *cells)))
    worst = tuple(cells for _, cells in sorted(rows, key=lambda row: -row[0])[:WORST])
    heads = ("Parameter", "Recipe", "Noise", "Gradient error", *(head for _, head in SHARES), "Gradient zero")
    left = f" of {len(rows):,}, which rehearsal.json has" if len(rows) > len(worst) else ""
    if worst:
        yield Fold(f"Parameters and recipes: the {len(worst)} worst{left}", (Grid(heads, worst),))
