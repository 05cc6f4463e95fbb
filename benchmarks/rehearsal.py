"""What a rehearsal says of planted problems, clean steps and real models, held against training by hand for many more steps.

python -m benchmarks.rehearsal [--steps 500] [--rehearsed 80] [CASE ...]
python -m benchmarks.rehearsal --cost

Training by hand uses nothing of the rehearsal: the step is written for each recipe with torch's own autocast and GradScaler
(`tests/features/rehearsal/cases.py`, Way) and runs under `auditor.emulate("cuda")`. A recipe trains as well as FP32 where its last
loss and the norm of its weights are no further off than those of FP32 on the same batches in three other orders, its weights are finite,
and at most one step in fifty of the second half is skipped.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import random
import statistics
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import auditor
from auditor.features.rehearsal.result import Recipe, code_of
from auditor.numerics.formats import dtype_of
from auditor.training.step import LOSS
from benchmarks.learning import fresh, next_character, task
from tests.features.rehearsal.cases import CASES, Case, Way, plain

ORDERS, SKIPPED, MARGIN = 3, 0.02, 0.02
"""Other orders of the batches; share of the steps that may be skipped; share of FP32's progress, and of its weights' norm,
that is added to how far apart the orders are."""
SLOW = {"accumulation_over_many": (20, 4), "minilm_l6": (24, 12)}
"""{case: steps by hand, and rehearsed}, where a step has hundreds of passes, or millions of parameters."""


@dataclass(frozen=True)
class Trained:
    """A run by hand. last: mean loss of the last tenth of the steps; skipped: share of the second half's."""

    first: float
    last: float
    norm: float
    skipped: float
    finite: bool


def train(make: Callable[..., Any], way: Way, steps: int, low: bool, order: int = 0) -> Trained:
    """The step of a case, written in a way, run on its batches in one of several orders."""
    step, batches = make(way)
    if order:
        random.Random(order).shuffle(batches)
    losses, repeated = [], itertools.cycle(batches)
    torch.manual_seed(0)
    with auditor.emulate("cuda") if low else nullcontext():
        for batch in itertools.islice(repeated, steps):
            try:
                losses.append(step(*batch))
            except RuntimeError:  # as where CUDA has no such operation in the format
                losses.append(math.nan)
                break
            if not math.isfinite(losses[-1]) and way.scale is None:
                break
    tenth, late = max(steps // 10, 1), way.skipped[len(way.skipped) // 2 :]
    parameters = [p.detach().double() for model in way.models for p in model.parameters()]
    norm = math.hypot(*(float(p.norm()) for p in parameters))
    kept = [loss for loss in losses[-tenth:] if math.isfinite(loss)]
    last = statistics.fmean(kept) if len(losses) == steps and kept else math.nan
    return Trained(
        statistics.fmean(losses[:tenth]), last, norm, sum(late) / max(len(late), 1), math.isfinite(norm + last)
    )


def way_of(recipe: Recipe) -> Way:
    """A recipe as a user writes it."""
    dtype = dtype_of(recipe.format)

    def prepare(optimizer: torch.optim.Optimizer) -> None:
        for name in recipe.remedies:
            exec(code_of(name), {"optimizer": optimizer, "torch": torch})

    return Way(
        dtype=None if recipe.stored or recipe.format == "fp32" else dtype,
        stored=dtype if recipe.stored else torch.float32,
        scale=recipe.scale,
        wide_loss=LOSS in recipe.scopes,
        islands=tuple(path for path, how in recipe.scopes.items() if how["precision"] == "fp32" and path != LOSS),
        prepare=prepare,
    )


@dataclass(frozen=True)
class Row:
    """A case: what was recommended, whether that trains as FP32 does, and of which recipes rehearsal and training say otherwise."""

    name: str
    recommended: str
    holds: bool
    planted: str
    remedy: str
    missed: tuple[str, ...]
    feared: tuple[str, ...]
    seconds: tuple[float, float]

    @property
    def agrees(self) -> bool:
        """Whether the recommendation trains well, what was planted shows in training, and every remedy that is said to repair it does."""
        return self.holds and "no" not in (self.planted, self.remedy)


def held(name: str, case: Case, steps: int, rehearsed: int) -> Row:
    """One case, rehearsed, and every recipe trained by hand."""
    steps, rehearsed = SLOW.get(name, (steps, rehearsed))
    began = _processor_time()
    found = auditor.rehearse(*case.make(), rehearsed)
    middle = _processor_time()
    orders = [train(case.make, way_of(found.runs["fp32"].recipe), steps, False, n) for n in range(ORDERS + 1)]
    room = MARGIN * abs(orders[0].first - orders[0].last)
    most, norms = max(one.last for one in orders) + room, [one.norm for one in orders]

    def well(one: Trained) -> bool:
        within = (1 - MARGIN) * min(norms) <= one.norm <= (1 + MARGIN) * max(norms)
        return one.finite and one.last <= most and within and one.skipped <= SKIPPED

    runs = {n: run.recipe for n, run in found.runs.items() if n != "fp32"}
    truth = {n: well(train(case.make, way_of(recipe), steps, True)) for n, recipe in runs.items()}
    broken = {problem.recipe for problem in found.problems}
    planted = dict.fromkeys(recipe for recipe, _ in case.broken)
    shown = "" if not planted else "yes" if all(not truth[recipe] for recipe in planted) else "no"
    repairs = [n for n, recipe in runs.items() if recipe.repairs in planted and n not in broken]
    remedy = "" if not repairs else "yes" if all(truth[n] for n in repairs) else "no"
    return Row(
        name,
        found.recommended,
        found.recommended == "fp32" or truth[found.recommended],
        shown,
        remedy,
        tuple(n for n in truth if not truth[n] and n not in broken),
        tuple(n for n in truth if truth[n] and n in broken),
        (middle - began, _processor_time() - middle),
    )


def _processor_time() -> float:
    """Seconds of this process and of those it waited for: a rehearsal forks one for every recipe."""
    return sum(os.times()[:4])


def real() -> dict[str, Case]:
    """Models that learn from real data: three from scratch, the last from the weights that a package has."""

    def maker(name: str) -> Callable[..., Any]:
        def make(way: Way | None = None) -> Any:
            learning = task(name)
            model = fresh(learning, 0)
            optimizer = torch.optim.AdamW(model.parameters(), lr=learning.rate)
            return plain(model, optimizer, learning.loss, way=way), list(itertools.islice(learning.batches(0), 64))

        return make

    names = ("01_digits_attention", "04_digits_resnet", "03_handwritten_transformer", "minilm_l6")
    return {name: Case(maker(name), "") for name in names}


def costs(steps: int) -> tuple[float, dict[str, float]]:
    """Processor seconds of the FP32 steps alone of a transformer with ten million parameters, and of every recipe's rehearsal."""
    torch.manual_seed(0)
    layers = nn.TransformerEncoder(nn.TransformerEncoderLayer(512, 8, batch_first=True), 3)
    model = nn.Sequential(nn.Embedding(1024, 512), layers, nn.Linear(512, 1024))
    ids = [torch.randint(1024, (8, 33)) for _ in range(8)]
    step = plain(model, torch.optim.AdamW(model.parameters(), lr=1e-4), next_character)
    batches, began = [(x[:, :-1], x[:, 1:]) for x in ids], dict[str, float]()

    def note(stage: str, title: str, done: int, total: int) -> None:
        began.setdefault(title, _processor_time())  # of the recipes before: a process counts once it has ended

    auditor.rehearse(step, batches, steps, remedies=False, progress=note)
    times = [*began.values(), _processor_time()]
    for batch in itertools.islice(itertools.cycle(batches), steps):
        step(*batch)
    alone = _processor_time() - times[-1]
    return alone, {title: end - start for title, (start, end) in zip(began, itertools.pairwise(times), strict=True)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--rehearsed", type=int, default=80)
    parser.add_argument("--cost", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.cost:
        alone, recipes = costs(steps := 100)
        print(
            f"{steps} steps in FP32, not rehearsed: {alone:.0f} s\n\n| recipe | seconds | times the steps |\n|---|---|---|"
        )
        for title, seconds in recipes.items():
            print(f"| {title} | {seconds:.0f} | {seconds / alone:.1f} |")
        return
    print(
        "| step | recommended | trains as FP32 | planted shows | remedy repairs | missed | feared | seconds: rehearsed, trained |"
    )
    print("|---|---|---|---|---|---|---|---|")
    rows = []
    for name, case in {**CASES, **real()}.items():
        if options.cases and name not in options.cases:
            continue
        row = held(name, case, options.steps, options.rehearsed)
        rows.append(row)
        seconds = ", ".join(f"{one:.0f}" for one in row.seconds)
        cells = (name, row.recommended, "yes" if row.holds else "no", row.planted, row.remedy)
        print("|", " | ".join((*cells, ", ".join(row.missed), ", ".join(row.feared), seconds)), "|", flush=True)
    print(f"\n{sum(row.agrees for row in rows)} of {len(rows)} agree.")


if __name__ == "__main__":
    main()
