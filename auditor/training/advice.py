"""What to do about training, each piece with the measurement that asks for it."""

from __future__ import annotations

import statistics
from collections.abc import Iterable

from ..numerics.formats import FORMATS, label
from ..numerics.histogram import merge_magnitudes
from ..numerics.nodes import is_collective
from ..numerics.operations import operation
from ..records import Capture
from ..records.training import Advice, Training

DOMINANT = 0.5
"""Share of the squared gradient norm from which an embedding is said to dominate."""

OUTLIER = 10.0
"""Times the median gradient norm of all modules."""

LOST = 0.1
"""Share of lost updates from which FP32 master weights are asked for."""

GROWTH = 2.0
"""Change of an error from a quarter of the batch to all of it that is worth a word."""

ADAM_EPS = 1e-8


def backward_fails(training: Training, captured: Capture) -> Iterable[Advice]:
    """Operations that must not run backwards in a format."""
    for node in training.nodes:
        for fmt, reason in node.reasons.items():
            yield Advice(
                "backward-fails",
                f"Keep {_place(node.owner)} in FP32 when training in {label(fmt)}",
                f"{node.op.removeprefix('aten.')} at {node.source or node.owner}: {reason}.",
                {"module": node.owner, "format": fmt},
            )


def embedding_dominates(training: Training, captured: Capture) -> Iterable[Advice]:
    """An embedding whose gradient is most of the whole."""
    tables = {source for node in captured.nodes.values() if operation(node.op).embedding for source in node.inputs[:1]}
    names = {place.fqn for place in captured.placeholders if place.name in tables}
    total = sum(p.gradient.norm**2 for p in training.parameters)
    for parameter in training.parameters:
        share = parameter.gradient.norm**2 / total if total else 0.0
        if parameter.name in names and share > DOMINANT:
            yield Advice(
                "embedding-dominates",
                f"Shrink the gradient of {parameter.name}",
                f"It makes {share:.0%} of the squared gradient norm. GLM-130B trained stably once the embedding's gradient "
                "was shrunk to 0.1: `x = 0.1 * x + 0.9 * x.detach()` behind the embedding.",
                {"share": share, "norm": parameter.gradient.norm},
            )


def gradient_outliers(training: Training, captured: Capture) -> Iterable[Advice]:
    """Modules whose gradient is far above the median of all."""
    norms: dict[str, float] = {}
    for parameter in training.parameters:
        norms[parameter.module] = (norms.get(parameter.module, 0.0) ** 2 + parameter.gradient.norm**2) ** 0.5
    alive = [norm for norm in norms.values() if norm > 0]
    if len(alive) < 4:
        return
    middle = statistics.median(alive)
    high = sorted((m for m, norm in norms.items() if norm > OUTLIER * middle), key=lambda m: -norms[m])
    if high:
        listed = ", ".join(f"{_place(m)} ({norms[m] / middle:.0f} times)" for m in high[:4])
        yield Advice(
            "gradient-outliers",
            "Watch the gradient norm of single layers",
            f"Against the median of {middle:.2g}: {listed}. A loss spike follows a spike of the gradient norm; log these, "
            "and clip.",
            {"median": middle, "largest": norms[high[0]]},
        )


def master_weights(training: Training, captured: Capture) -> Iterable[Advice]:
    """Weights stored in BF16 that would lose Adam's first updates."""
    if training.bf16 is None:
        return
    rate, share = 1e-3, training.bf16.lost_adam[1e-3]
    if share > LOST:
        yield Advice(
            "master-weights",
            "Keep FP32 master weights in BF16 training",
            f"With weights stored in BF16, {share:.0%} of Adam's first updates at a learning rate of {rate:g} are smaller "
            f"than half a spacing and are lost ({training.bf16.lost_adam[1e-4]:.0%} at 1e-4). Under autocast weights stay "
            "FP32 and nothing is lost; otherwise use a master copy or stochastic rounding.",
            {"learning_rate": rate, "lost": share},
        )


def adam_eps(training: Training, captured: Capture) -> Iterable[Advice]:
    """What FP16 would make of Adam's state and of its eps, and whether eps outweighs the gradients."""
    pool = merge_magnitudes(p.gradient for p in training.parameters)
    if not pool.nonzero:
        return
    fp16 = FORMATS["fp16"]
    edge = (fp16.min_exponent - fp16.mantissa - 1) / 2
    squares = sum(n for e, n in pool.exponents.items() if e + 1 <= edge) / pool.nonzero
    damped = sum(n for e, n in pool.exponents.items() if 2.0 ** (e + 1) <= ADAM_EPS) / pool.nonzero
    yield Advice(
        "adam-eps",
        "Keep Adam's state and eps in FP32",
        f"eps = {ADAM_EPS:g} is zero in FP16, and {_share(squares)} of the squared gradients would be too. In FP32, eps "
        f"outweighs {_share(damped)} of the gradients themselves. In BF16 eps survives, but the moving averages lose updates "
        "below 1/256 of them.",
        {"squares_lost_fp16": squares, "below_eps": damped},
    )


def low_collective(training: Training, captured: Capture) -> Iterable[Advice]:
    """Sums over ranks in the model's own code."""
    for node in (node for node in captured.nodes.values() if is_collective(node.op)):
        yield Advice(
            "low-collective",
            f"Reduce in FP32 in {_place(node.owner)}",
            f"{node.op} at {node.source or node.owner} adds what the ranks hold in the dtype that it is given: raise to FP32 "
            "before it.",
            {"module": node.owner},
        )


def reduce_dtype(training: Training, captured: Capture) -> Iterable[Advice]:
    """Equal gradients of how many ranks overflow FP16 when they are added at the recommended scale."""
    window = training.fp16
    largest = max((p.gradient.max_abs for p in training.parameters), default=0.0)
    if window is not None and window.init is not None and largest > 0:
        ranks = FORMATS["fp16"].largest / (largest * window.init)
        yield Advice(
            "reduce-dtype",
            "Reduce gradients over ranks in FP32",
            f"At a loss scale of {window.init:g} the sum of {ranks:.0f} equal gradients overflows FP16. Under autocast "
            "gradients are FP32 and so is their sum; that changes with an FP16 compression hook or FSDP's `reduce_dtype`.",
            {"ranks": ranks},
        )


def clip_after_unscale(training: Training, captured: Capture) -> Iterable[Advice]:
    """What clipping would take of gradients that are still scaled."""
    window = training.fp16
    norm = merge_magnitudes(p.gradient for p in training.parameters).norm
    if window is not None and window.init is not None and training.format == "fp16":
        yield Advice(
            "clip-after-unscale",
            "Clip after unscaling",
            f"The gradient norm is {norm:.3g}; before `scaler.unscale_(optimizer)` it reads {norm * window.init:.3g}, and "
            "clipping that to 1 would take nearly all of it.",
            {"norm": norm, "scaled": norm * window.init},
        )


def batch_size(training: Training, captured: Capture) -> Iterable[Advice]:
    """Errors and ranges that move with the size of the batch."""
    rows = training.batch_sizes
    if len(rows) < 2:
        return
    small, large = rows[0], rows[-1]
    parts = []
    for fmt in large.error:
        before, after = small.error.get(fmt), large.error.get(fmt)
        if before and after and max(before, after) > GROWTH * min(before, after):
            parts.append(f"the {label(fmt)} gradient error goes from {before:.2g} to {after:.2g}")
    if large.max_gradient and small.max_gradient > GROWTH * large.max_gradient:
        parts.append(f"the largest gradient falls from {small.max_gradient:.2g} to {large.max_gradient:.2g}")
    if parts:
        yield Advice(
            "batch-size",
            "Audit again at the batch size you train with",
            f"From {small.samples} to {large.samples} samples {' and '.join(parts)}; the window of loss scales moves with it.",
            {"small": small.samples, "large": large.samples},
        )


ADVICE = (
    backward_fails,
    embedding_dominates,
    gradient_outliers,
    master_weights,
    adam_eps,
    low_collective,
    reduce_dtype,
    clip_after_unscale,
    batch_size,
)
"""Every piece of advice, those first that decide whether training works at all."""


def advice_of(training: Training, captured: Capture) -> tuple[Advice, ...]:
    """All that applies, in the order of ADVICE."""
    return tuple(advice for piece in ADVICE for advice in piece(training, captured))


def _place(module: str) -> str:
    return module or "the model"


def _share(value: float) -> str:
    return "less than 0.1%" if 0 < value < 0.001 else f"{value:.1%}"
