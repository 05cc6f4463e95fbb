"""What a training audit predicts, held against training for real: loss scales, BF16 weights, loss curves of the plan."""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

import auditor
from auditor.artefact.base import plan_table
from auditor.execution.policy import Policy, plain
from auditor.features.training.measure import low_by_module, low_names
from auditor.features.training.recommend import loss_scale, lost_by_adam, lost_by_sgd, ratios_of
from auditor.isolation import in_training
from auditor.numerics.formats import FORMATS
from auditor.numerics.histogram import magnitudes_of, merge_magnitudes, significant, underflow_share
from auditor.records.training import LossScale, ParameterGradients
from auditor.training.replay import Step, bind_step, hear_gradients, run_step
from auditor.training.step import capture_step, step_batches, use_own_gradients
from benchmarks.drawing import Curves, drawn
from benchmarks.learning import Loop, Task, fresh, loop, subject_of, task

DOCS = Path(__file__).resolve().parents[1] / "docs"
TASKS = ("01_digits_attention", "04_digits_resnet")
BELOW, ABOVE = 2.0**-10, 2.0**6
"""Of the scales that are tried: one that flushes much, and one this many times the largest of the window."""


@dataclass(frozen=True)
class ScaleRow:
    """A training run at one loss scale. flushed, predicted: of the first step; skipped, predicted_skipped: steps."""

    task: str
    label: str
    scale: float | None
    flushed: float
    predicted: float
    skipped: int
    predicted_skipped: int
    final_loss: float


def window_of(learning: Task, seed: int = 0) -> LossScale:
    """The window before training, under plain autocast."""
    step = first_step(learning, fresh(learning, seed), seed, seed)
    gradients = {n: merge_magnitudes(magnitudes_of(g) for g in gs if g is not None) for n, gs in step.gradients.items()}
    window = loss_scale(low_by_module(step.capture, gradients, low_names(step.capture, "fp16", plain("fp16"))))
    assert window is not None and window.init is not None
    return window


def first_step(learning: Task, model: nn.Module, seed: int, drawn: int) -> Step:
    """The FP32 step on the first batch. drawn: seed of its random numbers."""
    subject = subject_of(learning, model, next(learning.batches(seed)))
    with in_training(model):
        captured = capture_step(subject, ("fp16",), drawn)
        return use_own_gradients(run_step(bind_step(captured, subject, step_batches(subject)[0], drawn)))


def scale_rows(learning: Task, steps: int, seed: int = 0) -> list[ScaleRow]:
    """FP32, then FP16 at the recommended scale, without scaling, far below and far above the window."""
    window = window_of(learning, seed)
    assert window.init is not None
    reference = loop(learning, seed, "fp32").run(steps)
    rows = [ScaleRow(learning.name, "FP32", None, 0.0, 0.0, 0, 0, final_loss(reference))]
    tried = {"recommended": window.init, "none": 1.0, "below": BELOW, "above": ABOVE * window.maximum}
    for label, scale in tried.items():
        trained = loop(learning, seed, "fp16", scale=scale)
        first = _flushed(trained, scale)
        trained.run(steps)
        # GradScaler halves its scale at every skipped step: it comes back into the window after log2(scale / maximum)
        expected = max(0, round(torch.log2(torch.tensor(scale / window.maximum)).item()))
        rows.append(
            ScaleRow(learning.name, label, scale, first[0], first[1], trained.skipped, expected, final_loss(trained))
        )
    return rows


def _flushed(trained: Loop, scale: float) -> tuple[float, float]:
    """Share of the low gradients that a step at a scale flushes: counted, and as the histograms of FP32's have it."""
    step = first_step(trained.learning, trained.model, trained.seed, 1000 * trained.seed)
    counts, ours = [0, 0], []

    def watch(name: str, index: int, gradient: torch.Tensor) -> None:
        reference = step.gradients.get(name, [])
        exact = reference[index] if index < len(reference) else None
        if gradient.dtype is torch.float16 and exact is not None:
            kept = significant(magnitudes_of(exact))
            floor = 2.0 ** min(kept.exponents, default=0)
            counts[0] += int(((gradient == 0) & (exact.abs() >= floor)).sum())
            counts[1] += kept.nonzero
            ours.append(kept)

    with in_training(trained.model):
        hear_gradients(step, Policy(step.capture, "autocast", plain("fp16"), "fp16"), scale, watch)
    shift = round(math.log2(scale))
    return counts[0] / max(counts[1], 1), underflow_share(merge_magnitudes(ours).exponents, FORMATS["fp16"], shift)


def final_loss(trained: Loop) -> float:
    """Mean loss of the last twenty steps."""
    return statistics.mean(trained.losses[-20:])


@dataclass(frozen=True)
class UpdateRow:
    """BF16 training with weights in FP32 or BF16. lost, predicted: share of lost updates in the first step."""

    task: str
    optimizer: str
    stored: str
    predicted: float
    lost: float
    lost_later: float
    final_loss: float


OPTIMIZERS = {
    "Adam, 1e-3": (lambda p: torch.optim.Adam(p, lr=1e-3), lambda q: lost_by_adam(q, 1e-3)),
    "Adam, 1e-4": (lambda p: torch.optim.Adam(p, lr=1e-4), lambda q: lost_by_adam(q, 1e-4)),
    "SGD, 0.1": (lambda p: torch.optim.SGD(p, lr=0.1), lambda q: lost_by_sgd(q, 0.1)),
}


def update_rows(learning: Task, steps: int, optimizers: Iterable[str] = OPTIMIZERS, seed: int = 0) -> list[UpdateRow]:
    """Weights in FP32, then in BF16, under each optimizer."""
    rows = []
    for name in optimizers:
        make, predict = OPTIMIZERS[name]
        for stored in ("fp32", "bf16"):
            trained = loop(learning, seed, "bf16", stored=stored, optimizer=make)
            expected = predict(_parameters(trained)) if stored == "bf16" else 0.0
            trained.run(steps)
            lost = trained.lost or [0.0]
            later = statistics.mean(lost[1:]) if len(lost) > 1 else 0.0
            rows.append(UpdateRow(learning.name, name, stored, expected, lost[0], later, final_loss(trained)))
    return rows


def _parameters(trained: Loop) -> tuple[ParameterGradients, ...]:
    """Weights and gradients of the first step, as an audit has them."""
    step = first_step(trained.learning, trained.model, trained.seed, 1000 * trained.seed)
    return tuple(
        ParameterGradients(
            n, "", magnitudes_of(w), magnitudes_of(step.by_parameter[n]), ratios_of(w, step.by_parameter[n]), True
        )
        for n, w in step.parameters.items()
    )


def curves(name: str, format: str, max_error: float, steps: int, seeds: Sequence[int]) -> Curves:
    """FP32, plain autocast, and the patched model, from the same weights on the same batches."""
    learning = task(name)
    found: dict[str, list[list[float]]] = {"fp32": [], "autocast": [], "plan": []}
    islands = 0
    for seed in seeds:
        model, batch = fresh(learning, seed), next(learning.batches(seed))
        audit = auditor.audit(
            model,
            batch,
            mode="training",
            loss_fn=learning.loss,
            formats=(format,),
            strategies=("autocast",),
            max_error=max_error,
            device="cpu",
        )
        plan = plan_table(audit.plans[f"autocast_{format}"])
        islands = sum(choice["precision"] == "fp32" for choice in plan["scopes"].values())
        window = audit.training.fp16 if audit.training else None
        scale = window.init if format == "fp16" and window is not None else None
        found["fp32"].append(loop(learning, seed, "fp32").run(steps).losses)
        found["autocast"].append(loop(learning, seed, format, scale=scale).run(steps).losses)
        found["plan"].append(loop(learning, seed, format, plan=plan, scale=scale).run(steps).losses)
    return Curves(name, format, max_error, islands, **found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("scales", "updates", "curves"))
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", default="", help="examples whose name begins so, such as 01")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, CPU, CUDA's autocast rules emulated")
    if options.what == "scales":
        _print_scales(options.steps, options.only)
    elif options.what == "updates":
        _print_updates(options.steps, options.only)
    else:
        _print_curves(options.steps, range(options.seeds), options.only)


def _print_scales(steps: int, only: str) -> None:
    print("| example | scale | flushed, predicted | counted | skipped, predicted | counted | final loss |")
    print("|---|---|---|---|---|---|---|")
    for name in filter(lambda name: name.startswith(only), TASKS):
        for row in scale_rows(task(name), steps):
            scale = "FP32" if row.scale is None else f"{row.label}: {row.scale:.10g}"
            print(
                f"| {row.task} | {scale} | {row.predicted:.2%} | {row.flushed:.2%} | {row.predicted_skipped} | "
                f"{row.skipped} | {row.final_loss:.4f} |",
                flush=True,
            )


def _print_updates(steps: int, only: str) -> None:
    print("| example | optimizer | weights | lost at first, predicted | counted | later | final loss |")
    print("|---|---|---|---|---|---|---|")
    for name in filter(lambda name: name.startswith(only), TASKS):
        for row in update_rows(task(name), steps):
            print(
                f"| {row.task} | {row.optimizer} | {row.stored.upper()} | {row.predicted:.1%} | {row.lost:.1%} | "
                f"{row.lost_later:.1%} | {row.final_loss:.4f} |",
                flush=True,
            )


CURVES = (("01_digits_attention", "bf16", 0.002), ("03_handwritten_transformer", "bf16", 0.002))


def _print_curves(steps: int, seeds: Sequence[int], only: str) -> None:
    print("| example | format | FP32 modules | gap of autocast | gap of the plan | last losses: FP32, autocast, plan |")
    print("|---|---|---|---|---|---|")
    for name, format, budget in filter(lambda row: row[0].startswith(only), CURVES):
        found = curves(name, format, budget, steps, seeds)
        last = [statistics.mean(c[-1] for c in kind) for kind in (found.fp32, found.autocast, found.plan)]
        print(
            f"| {name} | {format.upper()} | {found.islands} | {found.gap('autocast'):.5f} | {found.gap('plan'):.5f} | "
            f"{', '.join(f'{x:.4f}' for x in last)} |",
            flush=True,
        )
        (DOCS / f"training-{name[:2]}.svg").write_text(drawn(found), encoding="utf-8")


if __name__ == "__main__":
    main()
