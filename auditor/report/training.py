"""The training section as blocks: recommendation, gradients, loss scale, advice, tables, and a loop to copy."""

from __future__ import annotations

import math
from collections.abc import Iterator

from ..numerics.formats import FORMATS
from ..numerics.histogram import flushed, subnormal
from ..records.audit import Audit
from ..records.training import ModuleGradients, Training
from ..training.window import scaler_code
from .blocks import Block, Code, Fold, Lines, Table
from .charts import gradient_chart
from .words import count, label, magnitude, percent, ratio, scope, sentence, where

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
    chart, code = gradient_chart(found), loop_code(audit)
    return [
        Lines("", (sentence(found.recommendation),), "lead"),
        Lines("", (step, *errors), "about"),
        Fold(
            "Gradients, loss scale, updates, and a loop to copy",
            (
                chart or Lines("", ("No gradient is in a low format: autocast leaves this step in FP32.",), "empty"),
                *_window(found),
                *(
                    [Lines("What to do", tuple(f"{a.title}: {a.text}" for a in found.advice), listed=True)]
                    if found.advice
                    else [Lines("What to do", ("Nothing stands out.",))]
                ),
                *([Code("A loop to copy", code)] if code else []),
                *_modules(found),
                _movers(found),
                *_trials(found),
                *_batches(found),
                *_updates(found),
            ),
        ),
    ]


def _window(found: Training) -> Iterator[Block]:
    if (window := found.fp16) is None:
        return
    most, least = f"{window.maximum:,.10g}", f"{window.minimum:,.10g}"
    if window.closed_by is not None:
        said = f"It is empty: `{scope(window.closed_by)}` overflows beyond {most}, and {least} is needed."
    else:
        said = (
            f"From {least}, which keeps flushed gradients within {percent(window.allowed)}, to {most}, beyond which "
            f"`{scope(window.largest)}` overflows. GradScaler starts at {window.init:,.10g}."
        )
    yield Lines("The window of loss scales.", (said,))


def _modules(found: Training) -> Iterator[Block]:
    """Gradients by module: of the low ones, or of all where none is low."""
    init = found.fp16.init if found.fp16 else None
    shift = round(math.log2(init)) if init else 0

    def row(module: ModuleGradients) -> tuple[str, ...]:
        spread = module.low or module.activations
        shares = [flushed(spread.exponents, FP16), subnormal(spread.exponents, FP16)]
        low = map(percent, (*shares, flushed(spread.exponents, FP16, shift)))
        rounding = spread.rounding.get("bf16", 0.0)
        bits = f"{-math.log2(rounding):.1f}" if rounding else "all"
        return (f"`{scope(module.module)}`", magnitude(spread.max_abs), *(low if module.low else ["FP32"] * 3), bits)

    def lost(module: ModuleGradients) -> int:
        return round(flushed(module.low.exponents, FP16) * module.low.nonzero) if module.low else 0

    ordered = sorted(found.modules, key=lambda m: (-lost(m), -m.activations.max_abs))
    heads = ("Module", "Largest", "Zero", "Subnormal", "Zero, scaled", "BF16 bits")
    yield Table(heads, tuple(map(row, ordered[:ROWS])), caption="Gradients by module, those first that lose most")
    if len(ordered) > ROWS:
        left = f"{count(len(ordered) - ROWS, 'more module')}, and every parameter, in measurements.json."
        yield Lines("", (left,), "muted")


def _movers(found: Training) -> Block:
    rows = [
        (moved.isolated, (where(node), label(fmt), ratio(moved.isolated), ratio(moved.backward)))
        for node in found.nodes
        for fmt, moved in node.contributions.items()
        if moved.isolated and math.isfinite(moved.isolated)
    ]
    if not rows:
        return Lines("", (sentence(found.attribution or "No operation moves the parameter gradients measurably."),))
    rows.sort(key=lambda row: -row[0])
    heads = ("Operation", "Format", "Moves them", "Backwards")
    caption = "What disturbs the parameter gradients most, alone in low precision"
    return Table(heads, tuple(row for _, row in rows[:ROWS]), texts=2, caption=caption)


def _trials(found: Training) -> Iterator[Block]:
    if not found.trials:
        return
    rows = tuple(
        (
            f"{run.scale:,.10g}",
            percent(run.predicted),
            percent(run.flushed),
            "yes" if run.predicted_overflow else "no",
            "yes" if run.overflow else "no",
        )
        for run in found.trials
    )
    heads = ("Loss scale", "Zero, predicted", "Counted", "Overflow, predicted", "Seen")
    yield Table(heads, rows, texts=0, caption="FP16 steps that were run")
    said = tuple(f"At {run.scale:,.10g}: {sentence(run.explained)}" for run in found.trials if run.explained)
    if said:
        yield Lines("", said, "muted")


def _batches(found: Training) -> Iterator[Block]:
    if not found.batch_sizes:
        return
    heads = (
        "Samples",
        "Gradient norm",
        "Largest gradient",
        "Zero in FP16",
        *(f"{label(f)} error" for f in found.errors),
    )
    rows = tuple(
        (
            str(run.samples),
            magnitude(run.gradient_norm),
            magnitude(run.max_gradient),
            percent(run.flushed_unscaled),
            *(ratio(run.error[fmt]) for fmt in found.errors),
        )
        for run in found.batch_sizes
    )
    yield Table(heads, rows, texts=0, caption="The same step at several batch sizes")


def _updates(found: Training) -> Iterator[Block]:
    if found.bf16 and found.bf16.lost_adam:
        adam, sgd = found.bf16.lost_adam, found.bf16.lost_sgd
        rows = (
            ("Adam, first steps", *map(percent, adam.values())),
            ("SGD", *map(percent, sgd.values())),
        )
        heads = ("Learning rate", *(f"{rate:g}" for rate in adam))
        yield Table(heads, rows, caption="Updates lost if weights were stored in BF16")


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
    scaler = found.fp16.init if FORMATS[found.format].loss_scaling and found.fp16 else None
    dtype = f"torch.{FORMATS[found.format].storage}"
    own = found.loss_source == "the model's own loss"
    several = plan is not None and not own and found.returned == "tensors"
    ahead, tree = (["from copy import copy", "from dataclasses import fields, is_dataclass", ""], [_TREE])
    lines = [*(ahead if several else []), "import torch", *(tree if several else [])]
    lines += [*(["import patched_model"] if plan else []), "", *(_IN_FP32 if several else [])]
    lines += ['device = "cuda" if torch.cuda.is_available() else "cpu"']
    if plan:
        lines += [
            "# The patched model has autocast regions of its own: put no torch.autocast around it.",
            f"model = patched_model.apply(model, plan={plan!r})",
        ]
    lines += [
        "model = model.to(device).train()  # weights stay FP32: they are the master copy",
        "optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)",
    ]
    if scaler is not None:
        lines += [f"scaler = torch.amp.{scaler_code(scaler).replace('(', '(device, ', 1)}"]
    lines += ["", "for batch in loader:" if own else "for inputs, targets in loader:"]
    lines += ["    optimizer.zero_grad(set_to_none=True)", *_forward(plan is not None, own, dtype, found.returned)]
    if scaler is None:
        return "\n".join([*lines, "    loss.backward()", *_clip(), "    optimizer.step()", ""])
    stepped = ["    scaler.unscale_(optimizer)  # before clipping", *_clip(), "    scaler.step(optimizer)"]
    return "\n".join([*lines, "    scaler.scale(loss).backward()", *stepped, "    scaler.update()", ""])


def _forward(planned: bool, own: bool, dtype: str, returned: str) -> list[str]:
    """From the batch to its loss, which a plan has outside of its regions, in FP32."""
    inside = {"attribute": "model(**batch).loss", "mapping": 'model(**batch)["loss"]'}.get(returned, "model(**batch)")
    if not own:
        raised = {"tensor": "model(inputs).float()", "tensors": "in_fp32(model(inputs))"}[returned]
        inside = f"loss_fn({raised if planned else 'model(inputs)'}, targets)"
    if planned:
        return [f"    loss = {inside}" + ("" if own else "  # in FP32")]
    return [f"    with torch.autocast(device, dtype={dtype}):", f"        loss = {inside}"]


_TREE = "from torch.utils._pytree import tree_map"
_IN_FP32 = [
    "",
    "def in_fp32(outputs):",
    '    """The outputs, whatever structure they are in, for a loss in FP32."""',
    "    def raised(x):",
    "        if torch.is_tensor(x):",
    "            return x.float() if x.is_floating_point() else x",
    "        if not is_dataclass(x) or isinstance(x, type):",
    "            return x",
    "        wide = copy(x)",
    "        for item in fields(x):",
    "            object.__setattr__(wide, item.name, in_fp32(getattr(x, item.name)))",
    "        return wide",
    "",
    "    return tree_map(raised, outputs)",
    "",
]


def _clip() -> list[str]:
    return ["    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)"]


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
