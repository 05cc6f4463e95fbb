"""Advice for training; each piece names the measurement behind it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping

from ...execution.policy import Policy
from ...execution.resolve import is_low, resolve
from ...numerics.formats import FORMATS, label
from ...numerics.histogram import merge_magnitudes
from ...numerics.nodes import is_collective
from ...numerics.operations import operation
from ...records import Capture
from ...records.training import Advice, Training
from ...training.step import LOSS, StepPrecision

DOMINANT = 0.5
"""Minimum share of the squared gradient norm at which an embedding dominates."""

OUTLIER = 10.0
"""A module is an outlier if its gradient norm exceeds this multiple of the median over all modules."""

LOST = 0.1
"""Share above which the audit gives advice on lost updates, on gradients below Adam's eps, and on gradient errors."""

ADAM_EPS, ADAM_BETA2 = 1e-8, 0.999


def backward_fails(training: Training, captured: Capture, steps: Mapping[str, StepPrecision]) -> Iterable[Advice]:
    """Advice to keep operations in FP32 if their backward pass fails; says if autocast or a plan already does so."""
    ways = {f: resolve(Policy(captured, "autocast", StepPrecision(f).precision, f)) for f in steps}
    plans = {f: resolve(Policy(captured, "autocast", step.precision, f)) for f, step in steps.items() if step.plan}
    for node in training.nodes:
        name = node.op.removeprefix("aten.").partition(".")[0]
        protected = node.owner == LOSS and operation(node.op).autocast in ("fp32", "fp32_unless_dtype")
        for fmt, reason in node.reasons.items():
            values = (node.name, *captured.nodes[node.name].inputs)
            wide = not ways[fmt].touches_low(node.name) and not any(map(ways[fmt].low, values))
            if protected and (training.errors.get(fmt) or math.inf) < LOST:
                continue  # autocast runs the operation in FP32, which is correct
            done = fmt in plans and not is_low(plans[fmt].computed_format(node.name))
            already = " Autocast does so." if wide else f" The plan autocast_{fmt} does so." * done
            yield Advice(
                "backward-fails",
                f"Keep {name if node.owner in ('', LOSS) else node.owner} in FP32 when training in {label(fmt)}",
                f"At {node.op.removeprefix('aten.')} ({node.source or node.owner}), {reason}.{already}",
                {"module": node.owner, "format": fmt},
            )


def embedding_dominates(training: Training, captured: Capture) -> Iterable[Advice]:
    """Advice on an embedding whose gradient has more than half of the squared gradient norm."""
    tables = {source for node in captured.nodes.values() if operation(node.op).embedding for source in node.inputs[:1]}
    names = {place.fqn for place in captured.placeholders if place.name in tables}
    total = sum(p.gradient.norm**2 for p in training.parameters)
    for parameter in training.parameters:
        share = parameter.gradient.norm**2 / total if total else 0.0
        if parameter.name in names and share > DOMINANT:
            yield Advice(
                "embedding-dominates",
                f"Shrink the gradient of {parameter.name}",
                f"It contributes {share:.0%} of the squared gradient norm. GLM-130B trained stably after shrinking the "
                "embedding's gradient to a tenth: `x = 0.1 * x + 0.9 * x.detach()` after the embedding.",
                {"share": share, "norm": parameter.gradient.norm},
            )


def gradient_outliers(training: Training, captured: Capture) -> Iterable[Advice]:
    """Advice on modules whose gradient norm far exceeds the median of all modules."""
    norms: dict[str, float] = {}
    for parameter in training.parameters:
        norms[parameter.module] = (norms.get(parameter.module, 0.0) ** 2 + parameter.gradient.norm**2) ** 0.5
    alive = [norm for norm in norms.values() if norm > 0]
    if len(alive) < 4:
        return
    middle = statistics.median(alive)
    high = sorted((m for m, norm in norms.items() if norm > OUTLIER * middle), key=lambda m: -norms[m])
    if high:
        listed = ", ".join(f"{m or 'the model'} ({norms[m] / middle:.0f} times)" for m in high[:4])
        yield Advice(
            "gradient-outliers",
            "Monitor the gradient norm of single layers",
            f"The median gradient norm of a module is {middle:.2g}. Far larger norms: {listed}. A spike of a gradient norm often "
            "precedes a spike of the loss. Log these norms, and clip gradients.",
            {"median": middle, "largest": norms[high[0]]},
        )


def master_weights(training: Training, captured: Capture) -> Iterable[Advice]:
    """Advice to keep FP32 master weights if BF16 weights would lose many of Adam's first updates."""
    if training.bf16 is None:
        return
    rate, share = 1e-3, training.bf16.lost_adam[1e-3]
    if share > LOST:
        yield Advice(
            "master-weights",
            "Keep FP32 master weights in BF16 training",
            f"With BF16 weights, rounding loses {share:.0%} of Adam's first updates at learning rate {rate:g}, and "
            f"{training.bf16.lost_adam[0.0001]:.0%} at 1e-4: they are below half the spacing of BF16 numbers. Autocast "
            "keeps weights in FP32; otherwise use an FP32 master copy or stochastic rounding.",
            {"learning_rate": rate, "lost": share},
        )


def adam_eps(training: Training, captured: Capture) -> Iterable[Advice]:
    """Advice to keep Adam's state and eps in FP32, and on gradients below eps."""
    pool = merge_magnitudes(p.gradient for p in training.parameters)
    if not pool.nonzero:
        return
    fp16 = FORMATS["fp16"]
    edge = (fp16.min_exponent - fp16.mantissa - 1 - math.log2(1 - ADAM_BETA2)) / 2
    squares = sum(n * min(max(edge - e, 0.0), 1.0) for e, n in pool.exponents.items()) / pool.nonzero
    damped = sum(n for e, n in pool.exponents.items() if 2.0 ** (e + 1) <= ADAM_EPS) / pool.nonzero
    text = (
        f"Adam stores (1 - beta2) times the squared gradient. In FP16, {_share(squares)} of these values become zero, and "
        f"so does eps = {ADAM_EPS:g}. The step then divides by zero, and weights turn Inf or NaN. In BF16, eps is not zero, but a "
        "moving average loses all updates below 1/512 of its value, and some updates below 1/256."
    )
    if damped > LOST:
        text += f" In any format, {_share(damped)} of the gradient values are below eps, so that their weights hardly change; a smaller eps helps."
    yield Advice(
        "adam-eps",
        "Keep Adam's state and eps in FP32",
        text,
        {"squares_lost_fp16": squares, "below_eps": damped},
    )


def low_collective(training: Training, captured: Capture) -> Iterable[Advice]:
    """Advice to reduce in FP32, for every collective operation in the model's own code."""
    for node in (node for node in captured.nodes.values() if is_collective(node.op)):
        yield Advice(
            "low-collective",
            f"Reduce in FP32 in {node.owner or 'the model'}",
            f"{node.op} at {node.source or node.owner} adds the values of all ranks in the values' dtype. "
            "Cast the values to FP32 before the sum.",
            {"module": node.owner},
        )


def scaled_gradients(training: Training, captured: Capture) -> Iterable[Advice]:
    """Advice on summing gradients over ranks, and on clipping them, at the recommended FP16 loss scale."""
    window = training.fp16
    if window is None or window.init is None or training.format != "fp16":
        return
    if (largest := max((p.gradient.max_abs for p in training.parameters), default=0.0)) > 0:
        ranks = FORMATS["fp16"].largest / (largest * window.init)
        sums = (
            f"{math.ceil(ranks):,} ranks with this value add up to more than"
            if ranks > 1
            else "this value alone exceeds"
        )
        yield Advice(
            "reduce-dtype",
            "Reduce gradients over ranks in FP32",
            f"The largest gradient value is {largest:.3g}. At a loss scale of {window.init:,.10g}, {sums} FP16's largest number. Under autocast, gradients and "
            "their sum are FP32, but an FP16 compression hook or FSDP's `reduce_dtype` can make the sum FP16.",
            {"ranks": ranks},
        )

    norm = merge_magnitudes(p.gradient for p in training.parameters).norm
    yield Advice(
        "clip-after-unscale",
        "Clip after unscaling",
        f"The gradient norm is {norm:.3g}; before `scaler.unscale_(optimizer)` it is {norm * window.init:,.6g}. "
        f"Clipping this scaled norm to 1 would make the gradients {max(norm * window.init / max(norm, 1), 1):,.4g} times too small.",
        {"norm": norm, "scaled": norm * window.init},
    )


def zero_gradients(training: Training, captured: Capture) -> Iterable[Advice]:
    """Advice if parameters have zero gradients in this step, for example behind a layer initialized to zero."""
    zero = [p.name for p in training.parameters if not p.gradient.nonzero]
    if zero:
        more = f" and {len(zero) - 4} more" if len(zero) > 4 else ""
        yield Advice(
            "zero-gradients",
            "Audit again after some steps",
            f"The gradient of these parameters is zero in this step: {', '.join(zero[:4])}{more}. All results on "
            "gradients, including loss scales, exclude them.",
            {"parameters": len(zero)},
        )


ADVICE = (
    embedding_dominates,
    gradient_outliers,
    master_weights,
    adam_eps,
    low_collective,
    scaled_gradients,
    zero_gradients,
)
"""All kinds of advice but `backward_fails`."""


def advice_of(training: Training, captured: Capture, steps: Mapping[str, StepPrecision]) -> tuple[Advice, ...]:
    """All advice that applies, on failing backward passes first. steps: {format: precision of the measured step}."""
    others = (advice for piece in ADVICE for advice in piece(training, captured))
    return (*backward_fails(training, captured, steps), *others)


def _share(value: float) -> str:
    return "less than 0.1%" if 0 < value < 0.001 else f"{value:.1%}"
