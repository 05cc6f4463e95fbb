"""The training section: gradients against FP16's window, the window of loss scales, advice, and a loop to copy."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..numerics.formats import FORMATS
from ..result import Audit
from ..training.records import BackwardNode, ModuleGradients, Spread, Training
from ..training.spreads import flushed, merged, significant, subnormal
from ..training.window import scaler_code
from .charts import LEFT, RIGHT, WIDTH, Tick, scale
from .exponents import Band
from .words import label, percent, power, scope

LOW, HIGH = -48, 24
HEIGHT, TOP, BOTTOM = 230, 14, 36
ROWS = 10
FP16 = FORMATS["fp16"]


@dataclass(frozen=True)
class Outline:
    """One histogram as a path. key: how it is drawn; label: what it shows."""

    key: str
    label: str
    path: str


@dataclass(frozen=True)
class GradientChart:
    """Magnitudes of the low gradients in the bands of FP16, before and after the loss scale."""

    bands: tuple[Band, ...]
    outlines: tuple[Outline, ...]
    ticks: tuple[Tick, ...]
    summary: str
    height: int = HEIGHT
    bottom: int = HEIGHT - BOTTOM


@dataclass(frozen=True)
class WindowChart:
    """Flushed share against the loss scale. open: the window in pixels, None if empty; overflow: where it begins."""

    line: str
    allowed: float
    open: tuple[float, float] | None
    overflow: float
    init: float | None
    ticks: tuple[Tick, ...]
    shares: tuple[Tick, ...]
    height: int = HEIGHT
    bottom: int = HEIGHT - BOTTOM


@dataclass(frozen=True)
class ModuleRow:
    """One module's low gradients, or all of its gradients where none is low."""

    module: str
    largest: float
    flushed: str
    subnormal: str
    scaled: str
    bits: str


@dataclass(frozen=True)
class Mover:
    """An operation that disturbs the gradients of the parameters."""

    node: BackwardNode
    format: str
    moved: float
    backward: float


@dataclass(frozen=True)
class TrainingView:
    """Everything the section shows."""

    found: Training
    gradients: GradientChart | None
    window: WindowChart | None
    modules: tuple[ModuleRow, ...]
    modules_left: int
    movers: tuple[Mover, ...]
    code: str | None
    rates: tuple[str, ...]
    adam: tuple[str, ...]
    sgd: tuple[str, ...]


def training_view(audit: Audit) -> TrainingView | None:
    """The section's data; None for an audit in mode inference."""
    found = audit.training
    if found is None:
        return None
    ordered = sorted(found.modules, key=lambda m: (-_lost(m), -m.activations.max_abs))
    init = found.fp16.init if found.fp16 else None
    outlook = found.bf16
    return TrainingView(
        found,
        _gradient_chart(found),
        _window_chart(found),
        tuple(_row(module, init) for module in ordered[:ROWS]),
        max(0, len(ordered) - ROWS),
        _movers(found),
        loop_code(audit),
        tuple(f"{rate:g}" for rate in outlook.lost_adam) if outlook else (),
        tuple(percent(share) for share in outlook.lost_adam.values()) if outlook else (),
        tuple(percent(share) for share in outlook.lost_sgd.values()) if outlook else (),
    )


def _low(found: Training) -> Spread:
    spreads = [m.low for m in found.modules if m.low is not None]
    return merged([*spreads, *(significant(p.gradient) for p in found.parameters if p.low)])


def _lost(module: ModuleGradients) -> int:
    """How many of its low gradients are flushed."""
    return round(flushed(module.low.exponents, FP16) * module.low.nonzero) if module.low else 0


def _gradient_chart(found: Training) -> GradientChart | None:
    pool = _low(found)
    if not pool.nonzero:
        return None
    x = scale(LOW, HIGH + 1, LEFT, WIDTH - RIGHT)
    edge = FP16.min_exponent - FP16.mantissa
    stops = (LOW, edge - 1, FP16.min_exponent, 16, HIGH + 1)
    kinds = ("zero", "subnormal", "normal", "over")
    bands = tuple(Band(k, x(a), x(b)) for k, a, b in zip(kinds, stops, stops[1:], strict=False))
    outlines = [Outline("plain", "without a loss scale", _outline(pool.exponents, 0))]
    init = found.fp16.init if found.fp16 else None
    if init is not None and init != 1:
        shift = round(math.log2(init))
        outlines.append(Outline("scaled", f"scaled by {init:,.10g}", _outline(pool.exponents, shift)))
    ticks = tuple(Tick(x(e), power(2, e)) for e in (-40, -32, -24, -14, 0, 16))
    return GradientChart(bands, tuple(outlines), ticks, _summary(pool, init))


def _outline(exponents: Mapping[int, int], shift: int) -> str:
    """A closed staircase; heights are shares of the largest bin, on a square-root scale."""
    x = scale(LOW, HIGH + 1, LEFT, WIDTH - RIGHT)
    y = scale(0.0, 1.0, HEIGHT - BOTTOM, TOP)
    counts: dict[int, int] = {}
    for exponent, count in exponents.items():
        at = min(max(exponent + shift, LOW), HIGH)
        counts[at] = counts.get(at, 0) + count
    top = max(counts.values())
    low, high = min(counts), max(counts)
    steps = "".join(f"V{y(math.sqrt(counts.get(e, 0) / top)):g}H{x(e + 1):g}" for e in range(low, high + 1))
    return f"M{x(low):g} {HEIGHT - BOTTOM}{steps}V{HEIGHT - BOTTOM}z"


def _summary(pool: Spread, init: float | None) -> str:
    plain = f"Without a scale {percent(flushed(pool.exponents, FP16))} of the gradients that FP16 holds become zero"
    plain += f" and {percent(subnormal(pool.exponents, FP16))} are subnormal"
    if init is None:
        return f"{plain}."
    shift = round(math.log2(init))
    after = f"{percent(flushed(pool.exponents, FP16, shift))} and {percent(subnormal(pool.exponents, FP16, shift))}"
    return f"{plain}; scaled by {init:,.10g}, {after}."


def _window_chart(found: Training) -> WindowChart | None:
    window = found.fp16
    if window is None:
        return None
    powers = sorted(window.flushed)
    top, needed = math.log2(window.maximum), math.log2(window.minimum)
    x = scale(powers[0], powers[-1], LEFT, WIDTH - RIGHT)
    most = max(*window.flushed.values(), 2 * window.allowed)
    y = scale(0.0, math.sqrt(most), HEIGHT - BOTTOM, TOP)
    points = [(x(k), y(math.sqrt(window.flushed[k]))) for k in powers]
    every = max(1, math.ceil(len(powers) / 12))
    return WindowChart(
        "M" + "L".join(f"{a:g} {b:g}" for a, b in points),
        y(math.sqrt(window.allowed)),
        (x(needed), x(top)) if window.init is not None else None,
        x(top),
        x(math.log2(window.init)) if window.init is not None else None,
        tuple(Tick(x(k), power(2, k)) for k in powers[::every]),
        tuple(Tick(y(math.sqrt(s)), percent(s)) for s in _shares(most)),
    )


def _shares(most: float) -> Sequence[float]:
    return [share for share in (0.0, 0.01, 0.05, 0.2, 0.5, 1.0) if share <= most]


def _row(module: ModuleGradients, init: float | None) -> ModuleRow:
    spread = module.low or module.activations
    exponents = spread.exponents
    shift = round(math.log2(init)) if init else 0
    rounding = spread.rounding.get("bf16", 0.0)
    return ModuleRow(
        scope(module.module),
        spread.max_abs,
        percent(flushed(exponents, FP16)) if module.low else "FP32",
        percent(subnormal(exponents, FP16)) if module.low else "FP32",
        percent(flushed(exponents, FP16, shift)) if module.low else "FP32",
        f"{-math.log2(rounding):.1f}" if rounding else "all",
    )


def _movers(found: Training) -> tuple[Mover, ...]:
    rows = [
        Mover(node, label(fmt), error.contribution, error.backward or 0.0)
        for node in found.nodes
        for fmt, error in node.errors.items()
        if error.contribution and math.isfinite(error.contribution)
    ]
    return tuple(sorted(rows, key=lambda row: -row.moved)[:ROWS])


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
    scaler = found.fp16.init if found.format == "fp16" and found.fp16 else None
    dtype = {"fp16": "torch.float16", "bf16": "torch.bfloat16"}[found.format]
    own = found.loss_source == "the model's own loss"
    lines = ["import torch", *(["import patched_model"] if plan else []), ""]
    lines += ['device = "cuda" if torch.cuda.is_available() else "cpu"']
    lines += [f"model = patched_model.apply(model, plan={plan!r})"] if plan else []
    lines += [
        "model = model.to(device).train()  # weights stay FP32: they are the master copy",
        "optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)",
    ]
    if scaler is not None:
        lines += [f"scaler = torch.amp.{scaler_code(scaler).replace('(', '(device, ', 1)}"]
    lines += [
        "",
        "for batch in loader:" if own else "for inputs, targets in loader:",
        "    optimizer.zero_grad(set_to_none=True)",
        f"    with torch.autocast(device, dtype={dtype}):",
        "        loss = model(**batch).loss" if own else "        loss = loss_fn(model(inputs), targets)",
    ]
    if scaler is None:
        return "\n".join([*lines, "    loss.backward()", *_clip(), "    optimizer.step()", ""])
    stepped = ["    scaler.unscale_(optimizer)  # before clipping", *_clip(), "    scaler.step(optimizer)"]
    return "\n".join([*lines, "    scaler.scale(loss).backward()", *stepped, "    scaler.update()", ""])


def _clip() -> list[str]:
    return ["    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)"]


@dataclass(frozen=True)
class TrainingAnswers:
    """What the questions about training come to, None where they were not asked."""

    falling: str
    stalling: str
    unscaling: str


def training_answers(audit: Audit) -> TrainingAnswers | None:
    """Answers to what people ask about training; None for an audit in mode inference."""
    found = audit.training
    if found is None:
        return None
    window, outlook = found.fp16, found.bf16
    if window is None:
        falling = "Autocast lowers nothing here in FP16, or FP16 was not audited."
    elif window.closed_by is not None:
        falling = f"No scale suits this model: {scope(window.closed_by)} overflows beyond {window.maximum:,.10g}."
    else:
        falling = f"Beyond {window.maximum:,.10g} the gradients of {scope(window.largest)} overflow; start at {window.init:,.10g}."
    stalling = "BF16 was not audited."
    if outlook is not None:
        stalling = (
            f"With weights stored in BF16, {percent(outlook.lost_adam[1e-4])} of Adam's first updates at a learning rate of "
            "1e-4 round to nothing. Keep FP32 weights."
        )
    return TrainingAnswers(
        falling, stalling, "GradScaler wants FP32 weights: use autocast, never `model.half()`, for training."
    )
