"""Renders a rehearsal (training steps in several precision recipes) for a terminal and as one HTML file."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from functools import partial
from statistics import fmean

from ...report.blocks import Block, Chart, Code, Fold, Grid, Item, Prose, environment
from ...report.charts import line_chart, round_steps
from ...report.words import count, or_blank, percent, ratio, sentence, shorten
from ...training.step import LOSS
from .result import AS_WRITTEN, REMEDIES, Recipe, RecipeRun, Rehearsal, code_of

POINTS, WORST = 120, 12
"""Maximum number of points of a curve, and of rows in the table of parameters."""
SHARES = {"updates_lost": "Updates lost", "decay_lost": "Decay lost", "second_moment_stuck": "2nd moment stuck"}
MEASURES = {"error": "Gradient error", **SHARES}
CAPTION = (
    "Final loss: mean over the last steps. Skipped: number of steps without an update. The other columns are means over the last third of the sampled steps, "
    "and empty where they do not apply. Gradient error: relative L2 difference from FP32 gradients at the same weights. Updates lost, Decay lost: share of the weights "
    "that stay the same although their update, or weight decay, is not zero. 2nd moment stuck: of Adam's second moments that should change, the share that stays the same."
)


def overview(result: Rehearsal) -> list[Block]:
    """Blocks of the page: verdict, recipes, and problems with their remedies."""
    about = f"{count(result.steps, 'step')} of {result.target} in each recipe, on {count(result.batches, 'batch', 'batches')}"
    heads = ("Recipe", "Final loss", "Skipped", *MEASURES.values(), "")
    rows = tuple(_row(result, name, run) for name, run in result.runs.items())
    entries = [item for name, run in result.runs.items() if not run.recipe.repairs for item in _entries(result, name)]
    several = f"{count(len(entries), 'problem')} in recipes that are not recommended"
    fp32 = result.runs["fp32"]
    zero = [name for name, row in fp32.parameters.items() if {*row.zero_gradient} == {1.0}]
    zeros = f"Gradients that were zero in every sampled step: {', '.join(shorten(zero, 4, 'rehearsal.json'))}."
    noise = f"FP32 gradients of two batches differ by {or_blank(fp32.share('error'), percent)} (relative L2): gradient errors far below this value average out."
    emulated = f"The steps ran on a CPU that emulates a GPU. Problems that appear after more than {count(result.steps, 'step')} are not detected."
    return [
        Prose(f"Rehearsal of {result.target}", (about,), "title"),
        Prose("Verdict", (result.recommendation,), "good" if result.recommended != "fp32" else "error"),
        Grid(heads, rows, list(result.runs).index(result.recommended), caption="Recipes"),
        Prose("", (CAPTION,), "muted"),
        Prose("Problems", (several if entries else "No recipe has a problem.",)),
        *entries,
        Prose("Gradients", (zeros,) if zero else ()),
        Prose("Noise", (noise,) if fp32.share("error") is not None else ()),
        Prose("Caution", (emulated,), "warning"),
    ]


def render(result: Rehearsal) -> str:
    """The rehearsal as one HTML file: verdict, code of the recommended recipe, recipes, curves, problems and remedies."""
    texts = {block.label: block.texts for block in overview(result) if isinstance(block, Prose)}
    headline, _, proof = result.recommendation.partition(". ")
    working = (run.recipe for name, run in result.runs.items() if not result.problems_of(name))
    names = dict.fromkeys(remedy for recipe in working for remedy in recipe.remedies)
    cautions = [texts[label][0] for label in ("Caution", "Noise", "Gradients") if texts[label]]
    problems = [_problem(result, name) for name in result.runs if result.problems_of(name)]
    parts = {
        "recipes": _recipes(result),
        "charts": list(_charts(result)),
        "remedies": [Fold(f"The code of {REMEDIES[name][0]}", (Code("", code_of(name)),)) for name in names],
        "parameters": list(_parameters(result)),
    }
    return (
        environment()
        .get_template("rehearsal.html.jinja")
        .render(
            result=result,
            headline=f"{headline.rstrip('.')}.",
            proof=proof,
            code=[Code("The step to copy", step_code(result))],
            cautions=cautions,
            problems=[problem for problem in problems if problem is not None],
            hidden={name for name, blocks in parts.items() if not blocks},
            **parts,
        )
    )


def _problem(result: Rehearsal, name: str) -> tuple[str, list[str], list[str]] | None:
    """(title of a recipe, its problems, the results of its variants); None for a variant, which its recipe lists."""
    recipe = result.runs[name].recipe
    if recipe.repairs:
        return None
    texts = [sentence(problem.text) for problem in result.problems_of(name)]
    return recipe.title, texts, _variants(result, name)


def _variants(result: Rehearsal, name: str) -> list[str]:
    """A line for each variant of a recipe: the problems that it has left, and its loss."""
    lines = []
    for other, run in result.runs.items():
        if run.recipe.repairs == name:
            left = [f"{one.kind}, {one.text}" for one in result.problems_of(other)]
            lines.append(f"{run.recipe.title}: {'; '.join(left) or 'no problem'}; final loss {run.last_loss():.4g}.")
    return lines


def step_code(result: Rehearsal) -> str:
    """A training step in the recommended recipe; `compute_loss(model, batch)` stands for the user's forward and loss."""
    recipe = result.runs[result.recommended].recipe
    if recipe.name == "fp32" and AS_WRITTEN in result.runs:
        return "# FP32: FP32 weights, without autocast regions and without a GradScaler.\n"
    if recipe.name in ("fp32", AS_WRITTEN):
        return f"# {recipe.title}: recommended as it is, no change is needed.\n"
    dtype = f"torch.{'bfloat16' if recipe.format == 'bf16' else 'float16'}"
    lines = ["import torch", ""]
    if recipe.name.startswith("plan"):
        name = recipe.title.removeprefix("the plan ").partition(",")[0].partition(" with ")[0]
        lines += ["import patched_model  # from the directory of the audit", ""]
        lines += [f'model = patched_model.apply(model, plan="{name}")  # has its own autocast regions', ""]
    if recipe.stored:
        lines.append(f"model = model.to({dtype})  # before the optimizer is created; floating-point inputs too")
        for remedy in recipe.remedies:
            lines += ["", *code_of(remedy).rstrip().splitlines()]
        lines.append("")
    kept = [module for module in recipe.scopes if module not in ("", LOSS)] if recipe.repairs else []
    if kept and not recipe.name.startswith("plan"):
        lines += [f'# In FP32, each under torch.autocast("cuda", enabled=False): {", ".join(kept)}', ""]
    scaled = recipe.scale is not None
    if scaled:
        lines += [f'scaler = torch.amp.GradScaler("cuda", init_scale={recipe.scale:.10g})  # once', ""]
    lines += ["for batch in batches:", "    optimizer.zero_grad()"]
    if recipe.stored or recipe.name.startswith("plan"):
        lines.append("    loss = compute_loss(model, batch)")
    elif LOSS in recipe.scopes:
        lines.append(f'    with torch.autocast("cuda", dtype={dtype}):')
        lines += ["        outputs = forward(model, batch)", "    loss = loss_of(outputs.float(), batch)  # in FP32"]
    else:
        lines.append(f'    with torch.autocast("cuda", dtype={dtype}):')
        lines.append("        loss = compute_loss(model, batch)")
    if scaled:
        lines += ["    scaler.scale(loss).backward()", "    scaler.step(optimizer)", "    scaler.update()"]
    else:
        lines += ["    loss.backward()", "    optimizer.step()"]
    return "\n".join(lines) + "\n"


def _recipes(result: Rehearsal) -> list[Block]:
    """The table of recipes, with the meaning of its columns."""
    heads = ("Recipe", "Result", "Final loss", "Skipped", *MEASURES.values())
    rows = []
    for name, run in result.runs.items():
        title, *values, state = _row(result, name, run)
        rows.append((title, state, *values))
    best = list(result.runs).index(result.recommended)
    return [Grid(heads, tuple(rows), best, texts=2), Prose("", (CAPTION,), "muted")]


def _row(result: Rehearsal, name: str, run: RecipeRun) -> tuple[str, ...]:
    """A recipe's row in the table. Of a failed run, the row only shows the loss before the failure."""
    loss = f"{run.last_loss():.4g}" if run.losses else ""
    skipped = "" if run.failure is not None else f"{len(run.skipped)}"
    error, *shares = _measures(run)
    if name == "fp32":
        error = ""  # it is the noise between batches
    return run.recipe.title, loss, skipped, error, *shares, _state(result, name, run)


def _state(result: Rehearsal, name: str, run: RecipeRun) -> str:
    """What came of a recipe, in words."""
    if name == result.recommended:
        return "recommended"
    if run.failure is not None:
        return f"failed in step {len(run.losses)}"
    problems = result.problems_of(name)
    if problems:
        return count(len(problems), "problem")
    return "" if name == "fp32" else "no problem"


def _measures(run: RecipeRun, name: str = "") -> tuple[str, ...]:
    """Gradient error, and shares of the entries that should change but do not, of one parameter or of all together."""
    return tuple(or_blank(run.share(kind, name), ratio if kind == "error" else percent) for kind in MEASURES)


def _entries(result: Rehearsal, name: str) -> list[Item]:
    """The problems of a recipe; below the last of them, the problems that each of its variants has."""
    title = result.runs[name].recipe.title
    heads = [f"{title}, {one.kind}: {one.text}" for one in result.problems_of(name)]
    items = [Item(head, (), "warning") for head in heads]
    if items:
        notes = tuple(_variants(result, name))
        items[-1] = Item(heads[-1], notes, "warning")
    return items


def _charts(result: Rehearsal) -> Iterator[Chart]:
    """Losses and gradient errors over the steps, of all recipes but the variants that are not recommended."""
    shown = [run for name, run in result.runs.items() if not run.recipe.repairs or name == result.recommended]
    last = result.steps - 1
    ticks = [(step, f"{step:,}") for step in round_steps(last)]
    chart = partial(line_chart, last=max(last, 1), x_title="step", x_ticks=ticks)

    losses = [_curve(run, enumerate(run.losses)) for run in shown]
    about_losses = "Loss of each recipe on the same batches. Each point is the mean of neighboring steps."
    yield from chart("Loss", about_losses, losses, linear=True)

    errors = [_curve(run, zip(run.steps, run.errors, strict=True)) for run in shown]
    about_errors = (
        "Logarithmic. Relative L2 difference of all gradients from FP32 gradients at the same weights. The curve of FP32 is "
        "the difference between two batches."
    )
    yield from chart("Gradient error", about_errors, errors, linear=False)


def _curve(run: RecipeRun, values: Iterable[tuple[int, float | None]]) -> tuple[str, str, list[tuple[float, float]]]:
    """A curve for `line_chart`, of at most POINTS points (step, value); each is the mean of equally many neighbors."""
    shown = [(step, x) for step, x in values if x is not None and math.isfinite(x) and x > 0]
    width = max(math.ceil(len(shown) / POINTS), 1)
    points = []
    for start in range(0, len(shown), width):
        neighbors = shown[start : start + width]
        mean_step = fmean(step for step, _ in neighbors)
        points.append((mean_step, fmean(value for _, value in neighbors)))
    return _curve_style(run.recipe), run.recipe.title, points


def _curve_style(recipe: Recipe) -> str:
    """The style of a recipe's curve: by its format, dashed unless it is plain autocast."""
    if recipe.name == "fp32":
        return "plan"
    is_plain = not recipe.stored and not recipe.scopes and recipe.name != AS_WRITTEN
    return recipe.format if is_plain else f"{recipe.format} cast"


def _parameters(result: Rehearsal) -> Iterator[Fold]:
    """The parameters with the largest gradient errors or shares of lost updates, the worst first; without those whose
    gradients are nothing but rounding."""
    fp32 = result.runs["fp32"]
    found = [
        (name, run)
        for recipe, run in result.runs.items()
        if recipe != "fp32" and not run.recipe.repairs
        for name in run.parameters
        if not fp32.is_rounding(name)
    ]

    def worst_share(one: tuple[str, RecipeRun]) -> float:
        name, run = one
        return max(run.share(kind, name) or 0.0 for kind in MEASURES)

    found.sort(key=worst_share, reverse=True)
    heads = ("Parameter", "Recipe", "Noise", *MEASURES.values(), "Gradient zero")
    rows = list[tuple[str, ...]]()
    for name, run in found[:WORST]:
        noise = or_blank(fp32.share("error", name), ratio)
        zero = or_blank(run.share("zero_gradient", name), percent)
        rows.append((name, run.recipe.title, noise, *_measures(run, name), zero))
    left = f" of {len(found):,}; rehearsal.json lists all" if len(found) > len(rows) else ""
    if rows:
        yield Fold(f"Parameters and recipes: the {len(rows)} worst{left}", (Grid(heads, tuple(rows)),))
