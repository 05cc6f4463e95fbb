"""The nouns of a training audit; every record is frozen and holds data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from .measure import Magnitudes


@dataclass(frozen=True)
class ModuleGradients:
    """Gradients with respect to what the operations of one module return, and of their weights, all together.

    low: those of them that are in the low format when the model trains under autocast, without what FP32 itself would
    lose beside the largest of the same tensor; None where none is.
    """

    module: str
    activations: Magnitudes
    low: Magnitudes | None


@dataclass(frozen=True)
class ParameterGradients:
    """One parameter: its values, its gradient, and how an update compares with the spacing of BF16.

    ratios: {floor(log2(|g| / half a BF16 spacing of w)): count} over the entries where both are non-zero; an update of
    size lr * |g| is lost where lr * 2 ** ratio < 1. low: its gradient passes through the low format under autocast.
    """

    name: str
    module: str
    weight: Magnitudes
    gradient: Magnitudes
    ratios: Mapping[int, int]
    low: bool


@dataclass(frozen=True)
class BackwardError:
    """The backward pass of one operation alone in one format, on the FP32 values and gradients rounded to it.

    error: relative L2 error of what it hands to its inputs. nonfinite: entries that are finite in FP32. reaches: the
    parameter whose gradient turns non-finite, None if none does. unsupported: why it cannot run.
    contribution: how far its error, made forwards and backwards, moves the gradients of all parameters (relative L2);
    backward: the part made backwards. None where it was not attributed. decided_by: first-order | re-run.
    """

    error: float | None = None
    nonfinite: int = 0
    reaches: str | None = None
    unsupported: str | None = None
    contribution: float | None = None
    backward: float | None = None
    decided_by: str | None = None


@dataclass(frozen=True)
class BackwardNode:
    """One operation of the training step; errors and reasons by format. reason: why it is unsafe, where it is."""

    name: str
    op: str
    owner: str
    source: str | None
    errors: Mapping[str, BackwardError]
    reasons: Mapping[str, str]


@dataclass(frozen=True)
class LossScale:
    """The window of loss scales for FP16, all powers of two, and what is outside of it.

    minimum: the smallest that keeps the flushed share of the low gradients within `allowed`; maximum: the largest at
    which no low gradient overflows. init: what to start GradScaler with; None where the window is empty.
    closed_by: the module whose largest gradient sets the maximum, if the window is empty. largest: the same module in
    any case. flushed, subnormal: {log2 scale: share of the non-zero low gradients}.
    """

    minimum: float
    maximum: float
    init: float | None
    flushed_unscaled: float
    allowed: float
    closed_by: str | None
    largest: str
    starved: str | None
    flushed: Mapping[int, float]
    subnormal: Mapping[int, float]


@dataclass(frozen=True)
class Bf16Outlook:
    """What BF16 loses. flushed: share of the non-zero low gradients that become zero. lost_adam, lost_sgd: {learning
    rate: share of the updates smaller than half a spacing, where weights are stored in BF16}; Adam's first steps move
    every weight by the learning rate.
    """

    flushed: float
    lost_adam: Mapping[float, float]
    lost_sgd: Mapping[float, float]


@dataclass(frozen=True)
class BatchSize:
    """The same step on the first `samples` of a batch. error: of the parameter gradients under autocast, by format."""

    samples: int
    max_gradient: float
    gradient_norm: float
    flushed_unscaled: float
    error: Mapping[str, float | None]


@dataclass(frozen=True)
class Trial:
    """One FP16 step at one loss scale, run for real. flushed: share of the low gradients, non-zero in FP32, that came
    back as zero; predicted: the same from the histograms; overflow: GradScaler would skip the step.
    """

    scale: float
    flushed: float
    predicted: float
    overflow: bool
    predicted_overflow: bool


@dataclass(frozen=True)
class Advice:
    """One thing to do about training, with the measurement behind it."""

    code: str
    title: str
    text: str
    evidence: Mapping[str, float | str] = field(default_factory=dict)


@dataclass(frozen=True)
class Training:
    """What an audit of a training step found.

    format: the one to train in, None for FP32. plan: whose islands the low gradients were told apart by; None: plain
    autocast. errors: {format: relative L2 error of all parameter gradients in one low step}, None where it failed.
    attribution: why contributions are missing, where they are.
    """

    loss: float
    loss_source: str
    format: str | None
    plan: str | None
    modules: tuple[ModuleGradients, ...]
    parameters: tuple[ParameterGradients, ...]
    nodes: tuple[BackwardNode, ...]
    fp16: LossScale | None
    bf16: Bf16Outlook | None
    errors: Mapping[str, float | None]
    batch_sizes: tuple[BatchSize, ...]
    trials: tuple[Trial, ...]
    advice: tuple[Advice, ...]
    recommendation: str
    attribution: str | None = None
