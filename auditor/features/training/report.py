"""The training section: recommendation, gradients, loss scale, advice, tables, and a training loop to copy."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from ...numerics.formats import FORMATS
from ...numerics.histogram import subnormal_share, underflow_share
from ...records.audit import Audit
from ...records.training import LossScale, ModuleGradients, Training
from ...report.blocks import Block, Code, Fold, Grid, Prose
from ...report.training import training_plan, training_words
from ...report.words import count, label, magnitude, percent, ratio, scope, sentence, where
from ...snippets.trainers import training_code
from ..page import Page
from .chart import gradient_chart
from .recommend import count_underflows

ROWS = 10
FP16 = FORMATS["fp16"]
ADVICE_SHOWN = 4
"""Maximum number of pieces of advice that a terminal and Markdown name."""


def training_section(audit: Audit) -> list[Block]:
    """The report's section on training; empty for an audit in mode inference."""
    training = audit.training
    if training is None:
        return []
    under = f"under the plan `{training.plan}`" if training.plan else "under plain autocast"
    low = label("fp16" if "fp16" in audit.formats else audit.formats[0])
    noise = f"FP32 gradients of two batches differ by {ratio(training.noise)}; over many steps, such differences average out."
    errors = ", ".join(f"{ratio(error)} in {label(fmt)}" for fmt, error in training.errors.items())
    about = (
        f"The loss of the FP32 step, with {training.loss_source}, is {magnitude(training.loss)}. Low-precision gradients are the gradients that are {low} {under}.",
        f"The relative L2 error of a step's parameter gradients is {errors} (the largest of {count(training.batches, 'batch', 'batches')}).",
        noise * (training.noise is not None),
    )
    code = loop_code(audit)
    return [
        Prose("", (training_words(training),), "lead"),
        *([Code("A loop to copy", code)] if code else []),
        Prose("", about, "about"),
        Fold("Gradients, loss scale and updates", tuple(_details(audit, training))),
    ]


def _details(audit: Audit, training: Training) -> Iterator[Block]:
    none = Prose("", ("No gradient is in low precision, since autocast leaves this step in FP32.",), "empty")
    yield gradient_chart(training) or none
    if training.fp16 is not None:
        yield Prose("Loss scales in FP16.", (_window(training.fp16),))
    advice = tuple(f"{one.title}. {one.text}" for one in training.advice)
    yield Prose("What to do", advice or ("The measurements show no problem.",), listed=bool(advice))
    yield from _modules(training)
    yield _movers(training)
    if training.bf16 and training.bf16.lost_adam:
        adam, sgd = training.bf16.lost_adam, training.bf16.lost_sgd
        lost = (("Adam, first steps", *map(percent, adam.values())), ("SGD", *map(percent, sgd.values())))
        rates = ("Learning rate", *(f"{rate:g}" for rate in adam))
        yield Grid(rates, lost, caption="Share of updates that rounding would lose if weights were stored in BF16")


def _window(window: LossScale) -> str:
    most, least = f"{window.maximum:,.10g}", f"{window.minimum:,.10g}"
    if window.closed_by is not None:
        return f"No loss scale is usable. Above {most}, gradient values of `{scope(window.closed_by)}` overflow. Below {least}, over {percent(window.allowed)} of the gradient values become zero."
    if window.init is None:
        return "No loss scale is usable, since no tested scale gives finite gradients on every batch."
    return (
        f"At loss scales from {least} on, at most {percent(window.allowed)} of the gradient values become zero. Above {most}, gradient values of "
        f"`{scope(window.largest)}` overflow. The recommended initial scale is {window.init:,.10g}. If you divide the loss by n "
        "for gradient accumulation, multiply these scales by n."
    )


def _modules(training: Training) -> Iterator[Block]:
    """A table of gradients by module; for a module with low-precision gradients, only of these gradients."""
    shift = round(math.log2(training.fp16.init)) if training.fp16 and training.fp16.init else 0

    def row(module: ModuleGradients) -> tuple[str, ...]:
        spread, lost = module.low or module.activations, ["FP32"] * 3
        if module.low is not None:
            low = module.low.exponents
            shares = underflow_share(low, FP16), subnormal_share(low, FP16), underflow_share(low, FP16, shift)
            lost = [*map(percent, shares)]
        rounding = spread.rounding.get("bf16", 0.0)
        bits = f"{-math.log2(rounding):.1f}" if rounding else "all"
        return f"`{scope(module.module)}`", magnitude(spread.max_abs), *lost, bits

    lost = {m.module: count_underflows(m.low) if m.low else 0 for m in training.modules}
    ordered = sorted(training.modules, key=lambda m: (-lost[m.module], -m.activations.max_abs))
    heads = ("Module", "Largest", "Zero", "Subnormal", "Zero, scaled", "BF16 bits")
    yield Grid(
        heads,
        tuple(map(row, ordered[:ROWS])),
        caption="Gradients by module. Largest: the largest magnitude. Zero, Subnormal: shares of the low-precision gradient values that become zero or subnormal in FP16 without a loss scale. Zero, scaled: the share that becomes zero at the initial loss scale. FP32 in these columns: the module has no low-precision gradients. BF16 bits: correct bits after rounding to BF16",
    )
    if len(ordered) > ROWS:
        left = f"{count(len(ordered) - ROWS, 'more module')}, and every parameter, in measurements.json."
        yield Prose("", (left,), "muted")


def _movers(training: Training) -> Block:
    moved = [(one, node, fmt) for node in training.nodes for fmt, one in node.contributions.items()]
    moved = [row for row in moved if row[0].both and math.isfinite(row[0].both)]
    if not moved:
        return Prose("", (sentence(training.attribution or "No operation changes the parameter gradients measurably"),))
    moved.sort(key=lambda row: -row[0].both)
    rows = tuple((where(node), label(fmt), ratio(one.both), ratio(one.backward)) for one, node, fmt in moved[:ROWS])
    caption = "Operations that change the parameter gradients the most, each as the only one in low precision. Change: relative L2 change of the gradients with the operation's forward and backward pass in the format. Backward only: the same with only its backward pass in the format"
    return Grid(("Operation", "Format", "Change", "Backward only"), rows, texts=2, caption=caption)


def loop_code(audit: Audit) -> str | None:
    """A training loop for the recommended format; None if training stays FP32.

    The loop uses `model`, `loader` and, unless the model returns its loss, `loss_fn`.
    """
    result = audit.training
    if result is None or result.format is None:
        return None
    plan = training_plan(audit)
    arguments = ARGUMENTS[result.inputs]
    needs_cast_of_several = False
    if result.loss_source == "the model's own loss":
        loss = {"attribute": ".loss", "mapping": '["loss"]'}.get(result.returned, "")
        body = f"return model({arguments.format('batch')}){loss}"
    else:
        needs_cast_of_several = plan is not None and result.returned == "tensors"
        outputs = f"model({arguments.format('inputs')})"
        if needs_cast_of_several:
            outputs = f"in_fp32({outputs})"
        elif plan:
            outputs = f"{outputs}.float()"
        body = f"inputs, targets = batch\n    return loss_fn({outputs}, targets)"
    code = training_code(audit, result.format, plan)
    if needs_cast_of_several:
        code = f"import dataclasses\n{code}{IN_FP32}"
    return code + LOOP.format(body)


ARGUMENTS = {"tensor": "{}", "tuple": "*{}", "dict": "**{}", "both": "*{0}[0], **{0}[1]"}
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
    """Convert outputs of any structure to FP32, for a loss in FP32."""
    def wide(x):
        if torch.is_tensor(x):
            return x.float() if x.is_floating_point() else x
        if dataclasses.is_dataclass(x):
            return dataclasses.replace(x, **in_fp32(vars(x)))
        return x

    return torch.utils._pytree.tree_map(wide, outputs)
'''


def training_lines(audit: Audit) -> Sequence[str]:
    """How to train, and the titles of the first pieces of advice; empty for an audit in mode inference."""
    training = audit.training
    if training is None:
        return ()
    titles = dict.fromkeys(f"- {advice.title}" for advice in training.advice)
    return (training_words(training), *[*titles][:ADVICE_SHOWN])


PAGE = Page(
    "Training",
    "Training",
    lambda audit: (),
    training_section,
    is_folded=False,
    label="Training",
    lines=training_lines,
    is_answer=False,
    noun="recommendation",
)
