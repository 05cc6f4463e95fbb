"""Renders a rehearsal (training steps in several precision recipes) for a terminal and as one HTML file."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from statistics import fmean

from ..rehearsal.remedies import REMEDIES, code_of
from ..rehearsal.result import RecipeProblem, RecipeRun, Rehearsal
from .blocks import Block, Chart, Code, Fold, Grid, Item, Prose, environment
from .charts import line_chart, round_steps
from .words import count, or_blank, percent, ratio, shorten

POINTS, WORST = 120, 12
"""Maximum number of points of a curve, and of rows in the table of parameters."""
SHARES = {"updates_lost": "Updates lost", "decay_lost": "Decay lost", "second_moment_stuck": "2nd moment stuck"}
CAPTION = (
    "Recipes. Last loss: mean over the last steps. Skipped: number of steps without an update. The other columns are means over the last third of the sampled "
    "steps. Gradient error: relative L2 difference from FP32 gradients at the same weights. Updates lost, Decay lost: shares of the weights that their update, "
    "or weight decay, should change but does not. 2nd moment stuck: share of Adam's second moments that should change but do not"
)


def overview(result: Rehearsal) -> list[Block]:
    """Blocks of the page: verdict, recipes, and problems with their remedies."""
    about = f"{count(result.steps, 'step')} of {result.target} in each recipe, on {count(result.batches, 'batch', 'batches')}"
    heads = ("Recipe", "Last loss", "Skipped", "Gradient error", *SHARES.values(), "")
    rows = tuple(_row(result, name, run) for name, run in result.runs.items())
    entries = [_entry(result, problem) for problem in result.problems if not result.runs[problem.recipe].recipe.repairs]
    several = f"{count(len(entries), 'problem')} in recipes that are not recommended"
    fp32 = result.runs["fp32"]
    zero = [name for name, row in fp32.parameters.items() if {*row.zero_gradient} == {1.0}]
    zeros = f"Gradients that were zero in every sampled step: {', '.join(shorten(zero, 4, 'rehearsal.json'))}."
    noise = f"FP32 gradients of two batches differ by {percent(fp32.error or 0.0)}; gradient errors far below this value matter less."
    emulated = f"The steps ran on a CPU that emulates a GPU. Problems that appear after more than {count(result.steps, 'step')} are not detected."
    return [
        Prose(f"Rehearsal of {result.target}", (about,), "title"),
        Prose("Verdict", (result.recommendation,), "good" if result.recommended != "fp32" else "error"),
        Grid(heads, rows, list(result.runs).index(result.recommended), caption=CAPTION),
        Prose("Problems", (several if entries else "No recipe has a problem.",)),
        *entries,
        Prose("Gradients", (zeros,) if zero else ()),
        Prose("Noise", (noise,) if fp32.error else ()),
        Prose("Caution", (emulated,), "warning"),
    ]


def render(result: Rehearsal) -> str:
    """The rehearsal as one HTML file, with curves, the code of remedies, and a table of parameters."""
    working = (run.recipe for name, run in result.runs.items() if not result.problems_of(name))
    names = dict.fromkeys(remedy for recipe in working for remedy in recipe.remedies)
    codes = [Fold(f"The code of {REMEDIES[name][0]}", (Code("", code_of(name)),)) for name in names]
    page = [*overview(result)[1:], *_charts(result), *codes, *_parameters(result)]
    title = f"Rehearsal of {result.target}"
    return environment().get_template("diff.html.jinja").render(title=title, headline=title, page=page)


def _row(result: Rehearsal, name: str, run: RecipeRun) -> tuple[str, ...]:
    """A recipe's row in the table. Of a failed run, the row only shows the loss before the failure."""
    broken, fails = len(result.problems_of(name)), run.failure is not None
    state = count(broken, "problem") if broken else "no problem" * (name != "fp32")
    state = "recommended" if name == result.recommended else f"failed in step {len(run.losses)}" if fails else state
    loss, skipped = f"{run.last_loss():.4g}" if run.losses else "", "" if fails else f"{len(run.skipped)}"
    error = ratio(run.error) if run.errors and name != "fp32" else ""
    return run.recipe.title, loss, skipped, error, *(or_blank(run.share(kind), percent) for kind in SHARES), state


def _entry(result: Rehearsal, problem: RecipeProblem) -> Item:
    """A problem with the results of its remedies. A remedy that repairs all problems of a recipe is only listed at the
    first problem."""
    same, notes = result.problems_of(problem.recipe), list[str]()
    for name, other in result.runs.items():
        left = result.problems_of(name)
        if other.recipe.repairs != problem.recipe or (not left and problem != same[0]):
            continue
        effect = f"repairs {'this problem' if left or not same[1:] else f'these {len(same)} problems'}"
        ends = next((p for p in left if p.kind in (problem.kind, "not-finite", "fails")), None)
        said = f"{effect}; last loss {other.last_loss():.4g}"
        if ends is not None:
            said = f"{'still' if ends.kind == problem.kind else 'instead'}, {ends.text}"
        notes.append(f"{other.recipe.title}: {said}.")
    return Item(f"{result.runs[problem.recipe].recipe.title}, {problem.kind}: {problem.text}", tuple(notes), "warning")


def _charts(result: Rehearsal) -> Iterator[Chart]:
    shown = [run for name, run in result.runs.items() if not run.recipe.repairs or name == result.recommended]
    steps, fp32 = range(result.steps), result.runs["fp32"]
    losses = [(_style(run), run.recipe.title, _curve(steps, run.losses)) for run in shown]
    errors = [(_style(run), run.recipe.title, _curve(run.steps, run.errors)) for run in shown if run is not fp32]
    errors.append(("budget", "noise", _curve(fp32.steps, fp32.errors)))
    of_losses = "Loss of each recipe on the same batches (logarithmic). Each point is the mean of neighboring steps."
    of_errors = "Relative L2 difference of all gradients from FP32 gradients at the same weights. Noise: difference between the FP32 gradients of two batches."
    ticks = [(step, f"{step:,}") for step in round_steps(result.steps - 1)]
    for label, about, curves in (("Loss", of_losses, losses), ("Gradient error", of_errors, errors)):
        yield from line_chart(label, about, curves, max(result.steps - 1, 1), "step", ticks)


def _curve(steps: Sequence[int], values: Sequence[float | None]) -> list[tuple[float, float]]:
    """At most POINTS points (step, value); each point is the mean of equally many neighboring steps."""
    known = [(step, x) for step, x in zip(steps, values, strict=False) if x is not None and math.isfinite(x) and x > 0]
    width = max(math.ceil(len(known) / POINTS), 1)
    parts = (zip(*known[i : i + width], strict=True) for i in range(0, len(known), width))
    return [(fmean(at), fmean(of)) for at, of in parts]


def _style(run: RecipeRun) -> str:
    stored = " cast" if run.recipe.stored or run.recipe.scopes else ""
    return "plan" if run.recipe.name == "fp32" else f"{run.recipe.format}{stored}"


def _parameters(result: Rehearsal) -> Iterator[Fold]:
    """The parameters with the largest gradient errors or shares of lost updates, the worst first."""
    fp32, rows = result.runs["fp32"], list[tuple[float, tuple[str, ...]]]()
    for run in (run for run in result.runs.values() if run is not fp32 and not run.recipe.repairs):
        for name in run.parameters:
            late = [run.share(kind, name) for kind in ("error", *SHARES, "zero_gradient")]
            cells = run.recipe.title, ratio(fp32.share("error", name)), *(or_blank(one, percent) for one in late)
            rows.append((max(one or 0.0 for one in late[:-1]), (name, *cells)))
    worst = tuple(cells for _, cells in sorted(rows, key=lambda row: -row[0])[:WORST])
    heads = ("Parameter", "Recipe", "Noise", "Gradient error", *SHARES.values(), "Gradient zero")
    left = f" of {len(rows):,}; rehearsal.json lists all" if len(rows) > len(worst) else ""
    if worst:
        yield Fold(f"Parameters and recipes: the {len(worst)} worst{left}", (Grid(heads, worst),))
