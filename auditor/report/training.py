"""The training section as blocks: recommendation, gradients, loss scale, advice, tables, and a loop to copy."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TypeVar

from ..numerics.formats import FORMATS
from ..numerics.histogram import flushed, subnormal
from ..records.audit import Audit
from ..records.training import BatchSize, LossScale, ModuleGradients, Training, Trial
from ..snippets.trainers import training_code
from .blocks import Block, Code, Fold, Lines, Table
from .charts import gradient_chart
from .words import count, label, magnitude, percent, ratio, scope, sentence, where

T = TypeVar("T")
Columns = Mapping[str, Callable[[T], str]]
ROWS = 10
FP16 = FORMATS["fp16"]


def training_section(audit: Audit) -> list[Block]:
    """What the report says of training; nothing for an audit in mode inference."""
    found = audit.training
    if found is None:
        return []
    under = f"under the plan `{found.plan}`" if found.plan else "under plain autocast"
    step = f"One FP32 step with {found.loss_source}, loss {magnitude(found.loss)}; gradients as they are {under}."
    errors = [
        f"The parameter gradients of one {label(fmt)} step differ by {ratio(error)}."
        for fmt, error in found.errors.items()
    ]
    title = "Gradients, loss scale, updates, and a loop to copy"
    return [
        Lines("", (sentence(found.recommendation),), "lead"),
        Lines("", (step, *errors), "about"),
        Fold(title, tuple(_details(audit, found))),
    ]


def _details(audit: Audit, found: Training) -> Iterator[Block]:
    none = Lines("", ("No gradient is in a low format: autocast leaves this step in FP32.",), "empty")
    yield gradient_chart(found) or none
    if found.fp16 is not None:
        yield Lines("The window of loss scales.", (_window(found.fp16),))
    advice = tuple(f"{one.title}: {one.text}" for one in found.advice)
    yield Lines("What to do", advice or ("Nothing stands out.",), listed=bool(advice))
    if code := loop_code(audit):
        yield Code("A loop to copy", code)
    yield from _modules(found)
    yield _movers(found)
    if found.trials:
        columns: Columns[Trial] = {
            "Loss scale": lambda run: f"{run.scale:,.10g}",
            "Zero, predicted": lambda run: percent(run.predicted),
            "Counted": lambda run: percent(run.flushed),
            "Overflow, predicted": lambda run: "yes" if run.predicted_overflow else "no",
            "Seen": lambda run: "yes" if run.overflow else "no",
        }
        yield _table("FP16 steps that were run", found.trials, columns, 0)
    if said := tuple(f"At {run.scale:,.10g}: {sentence(run.explained)}" for run in found.trials if run.explained):
        yield Lines("", said, "muted")
    if found.batch_sizes:
        measured: Columns[BatchSize] = {
            "Samples": lambda run: str(run.samples),
            "Gradient norm": lambda run: magnitude(run.gradient_norm),
            "Largest gradient": lambda run: magnitude(run.max_gradient),
            "Zero in FP16": lambda run: percent(run.flushed_unscaled),
            **{f"{label(fmt)} error": _error_in(fmt) for fmt in found.errors},
        }
        yield _table("The same step at several batch sizes", found.batch_sizes, measured, 0)
    if found.bf16 and found.bf16.lost_adam:
        adam, sgd = found.bf16.lost_adam, found.bf16.lost_sgd
        rows = (("Adam, first steps", *map(percent, adam.values())), ("SGD", *map(percent, sgd.values())))
        heads = ("Learning rate", *(f"{rate:g}" for rate in adam))
        yield Table(heads, rows, caption="Updates lost if weights were stored in BF16")


def _table(caption: str, items: Iterable[T], columns: Columns[T], texts: int = 1) -> Table:
    rows = tuple(tuple(cell(item) for cell in columns.values()) for item in items)
    return Table(tuple(columns), rows, texts=texts, caption=caption)


def _error_in(fmt: str) -> Callable[[BatchSize], str]:
    return lambda run: ratio(run.error[fmt])


def _window(window: LossScale) -> str:
    most, least = f"{window.maximum:,.10g}", f"{window.minimum:,.10g}"
    if window.closed_by is not None:
        return f"It is empty: `{scope(window.closed_by)}` overflows beyond {most}, and {least} is needed."
    return (
        f"From {least}, which keeps flushed gradients within {percent(window.allowed)}, to {most}, beyond which "
        f"`{scope(window.largest)}` overflows. GradScaler starts at {window.init:,.10g}."
    )


def _modules(found: Training) -> Iterator[Block]:
    """Gradients by module: of the low ones, or of all where none is low."""
    init = found.fp16.init if found.fp16 else None
    shift = round(math.log2(init)) if init else 0

    def bits(module: ModuleGradients) -> str:
        rounding = (module.low or module.activations).rounding.get("bf16", 0.0)
        return f"{-math.log2(rounding):.1f}" if rounding else "all"

    def low(lost: Callable[[Mapping[int, int]], float]) -> Callable[[ModuleGradients], str]:
        return lambda module: percent(lost(module.low.exponents)) if module.low else "FP32"

    def lost(module: ModuleGradients) -> int:
        return round(flushed(module.low.exponents, FP16) * module.low.nonzero) if module.low else 0

    columns: Columns[ModuleGradients] = {
        "Module": lambda module: f"`{scope(module.module)}`",
        "Largest": lambda module: magnitude((module.low or module.activations).max_abs),
        "Zero": low(lambda exponents: flushed(exponents, FP16)),
        "Subnormal": low(lambda exponents: subnormal(exponents, FP16)),
        "Zero, scaled": low(lambda exponents: flushed(exponents, FP16, shift)),
        "BF16 bits": bits,
    }
    ordered = sorted(found.modules, key=lambda m: (-lost(m), -m.activations.max_abs))
    yield _table("Gradients by module, those first that lose most", ordered[:ROWS], columns)
    if len(ordered) > ROWS:
        left = f"{count(len(ordered) - ROWS, 'more module')}, and every parameter, in measurements.json."
        yield Lines("", (left,), "muted")


def _movers(found: Training) -> Block:
    moved = [(one, node, fmt) for node in found.nodes for fmt, one in node.contributions.items()]
    moved = [row for row in moved if row[0].isolated and math.isfinite(row[0].isolated)]
    if not moved:
        return Lines("", (sentence(found.attribution or "No operation moves the parameter gradients measurably."),))
    moved.sort(key=lambda row: -row[0].isolated)
    rows = tuple((where(node), label(fmt), ratio(one.isolated), ratio(one.backward)) for one, node, fmt in moved[:ROWS])
    caption = "What disturbs the parameter gradients most, alone in low precision"
    return Table(("Operation", "Format", "Moves them", "Backwards"), rows, texts=2, caption=caption)


def training_plan(audit: Audit) -> str | None:
    """The plan to train under: that of autocast in the format to train in, if the audit has one that holds."""
    found = audit.training
    plan = audit.plans.get(f"autocast_{found.format}") if found else None
    return plan.name if plan is not None and plan.verified else None


def loop_code(audit: Audit) -> str | None:
    """A training loop for the recommended format; None where training stays FP32.

    It expects `model`, `loader` and `loss_fn`, and `patched_model.py` beside it.
    """
    found = audit.training
    if found is None or found.format is None:
        return None
    plan = training_plan(audit)
    several = plan is not None and found.returned == "tensors"
    outputs = "in_fp32(model(inputs))" if several else "model(inputs).float()" if plan else "model(inputs)"
    body = f"inputs, targets = batch\n    return loss_fn({outputs}, targets)"
    if found.loss_source == "the model's own loss":
        several, answer = False, {"attribute": ".loss", "mapping": '["loss"]'}.get(found.returned, "")
        body = f"return model(**batch){answer}"
    return training_code(audit, found.format, plan) + IN_FP32 * several + LOOP.format(body)


LOOP = """

def compute_loss(model, batch):
    {}


model, scaler = prepare(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for batch in loader:
    train_step(model, scaler, optimizer, compute_loss, batch, max_norm=1.0)
"""
IN_FP32 = '''

def in_fp32(outputs):
    """The outputs, whatever structure they are in, for a loss in FP32."""
    from copy import copy
    from dataclasses import fields, is_dataclass

    def wide(x):
        if torch.is_tensor(x):
            return x.float() if x.is_floating_point() else x
        if not is_dataclass(x) or isinstance(x, type):
            return x
        made = copy(x)
        for item in fields(x):
            object.__setattr__(made, item.name, in_fp32(getattr(x, item.name)))
        return made

    return torch.utils._pytree.tree_map(wide, outputs)
'''


def training_headline(audit: Audit) -> str | None:
    """How to train, in one sentence; None for an audit in mode inference."""
    found = audit.training
    if found is None:
        return None
    if found.format is None:
        return "Train it in FP32."
    plan = training_plan(audit)
    under = "under that plan" if plan is not None and plan == audit.recommended else "under autocast"
    if FORMATS[found.format].loss_scaling and found.fp16 is not None and found.fp16.init is not None:
        return f"Train it in {label(found.format)} {under}, with a loss scale from {found.fp16.init:,.10g}."
    return f"Train it in {label(found.format)} {under}, without a loss scale."
