"""Data classes of a training audit; all are frozen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from .graph import CalledFrom
from .measure import Magnitudes, NodeError
from .written import FileField, MeasurementField, empty


@dataclass(frozen=True)
class ModuleGradients:
    """Gradients of the results of one module's operations, and of their weights, together."""

    module: Annotated[str, FileField("path of the module; `(loss)` for operations outside the model")]
    activations: Annotated[Magnitudes, FileField("histogram of the gradients of its operations' results")]
    low: Annotated[Magnitudes | None, FileField("those that autocast makes low, without those that FP32 would lose")]


@dataclass(frozen=True)
class ParameterGradients:
    """One parameter: its values, its gradient, and the size of an update relative to the spacing of BF16.

    Rounding discards an update of size lr * |g| where lr * 2 ** ratio < 1.
    """

    name: Annotated[str, FileField("name of the parameter in the state dict")]
    module: Annotated[str, FileField("path of the module that uses it; `(loss)` for operations outside the model")]
    weight: Annotated[Magnitudes, FileField("histogram of its values")]
    gradient: Annotated[Magnitudes, FileField("histogram of its gradient")]
    ratios: Annotated[Mapping[int, int], FileField("count by log2 of gradient divided by half a BF16 spacing", least=1)]
    low: Annotated[bool, FileField("whether its gradient passes through low precision under autocast")]


@dataclass(frozen=True)
class GradientChange:
    """How far one operation in one format, all else in FP32, moves the parameter gradients (relative L2, unit 1)."""

    both: Annotated[float, FileField("gradient change of a step with the operation low, forwards and backwards")]
    backward: Annotated[float, FileField("gradient change with only its backward pass low")]


@dataclass(frozen=True)
class BackwardNode:
    """Errors of one operation's backward pass in every format, and its effect on the gradients."""

    name: Annotated[str, FileField("name in the captured graph")]
    op: Annotated[str, FileField("ATen overload")]
    owner: Annotated[str, FileField("module it belongs to")]
    source: Annotated[str | None, FileField("line that wrote it, as for operations")]
    errors: Annotated[Mapping[str, NodeError], FileField("by format: errors of the gradients it returns")]
    contributions: Annotated[Mapping[str, GradientChange], FileField("by format: how far it moves gradients, if run")]
    reaches: Annotated[Mapping[str, str], FileField("parameter whose gradient turns non-finite with it")]
    reasons: Annotated[Mapping[str, str], FileField("why it must not run in the format when training; `null`: it can")]
    called_from: CalledFrom = None


@dataclass(frozen=True)
class LossScale:
    """The range of usable loss scales for FP16, all powers of two, and the share of gradients lost outside it."""

    minimum: Annotated[float, FileField("smallest scale at which at most the share `allowed` underflows", exact=True)]
    maximum: Annotated[float, FileField("largest scale at which no low gradient overflows", exact=True)]
    init: Annotated[float | None, FileField("initial scale for GradScaler; `null`: the window is empty", exact=True)]
    flushed_unscaled: Annotated[float, FileField("share of low gradients that FP16 zeroes unscaled", least=0, most=1)]
    allowed: Annotated[float, FileField("share of the gradients that may underflow", least=0, most=1, exact=True)]
    closed_by: Annotated[str | None, FileField("the module whose gradients overflow first, if the window is empty")]
    largest: Annotated[str, FileField("module that sets the window's upper end")]
    starved: Annotated[str | None, FileField("module with most underflow at the upper end; `null`: none")]
    flushed: Annotated[Mapping[int, float], FileField("by log2 of the scale: share turned to zero", least=0, most=1)]
    subnormal: Annotated[Mapping[int, float], FileField("by log2 of the scale: share subnormal", least=0, most=1)]


@dataclass(frozen=True)
class Bf16Outlook:
    """Updates that BF16 weights lose; Adam's first steps move every weight by the learning rate."""

    flushed: Annotated[float, FileField("share of the low gradients that underflow to zero", least=0, most=1)]
    lost_adam: Annotated[Mapping[float, float], FileField("by Adam's learning rate: lost share", least=0, most=1)]
    lost_sgd: Annotated[Mapping[float, float], FileField("the same for SGD", least=0, most=1)]


@dataclass(frozen=True)
class Advice:
    """A recommendation for training, with the measurement behind it."""

    code: Annotated[str, FileField("its kind")]
    title: Annotated[str, FileField("the recommendation")]
    text: Annotated[str, FileField("why")]
    evidence: Annotated[Mapping[str, Any], FileField("the numbers, by name")] = empty()


@dataclass(frozen=True, kw_only=True)
class Training:
    """Results of auditing a training step."""

    format: Annotated[str | None, FileField("format to train in; `null`: FP32")]
    recommendation: Annotated[str, FileField("the reason and the scaler, in one sentence")]
    plan: Annotated[str | None, FileField("plan that the window applies to; `null`: plain autocast")]
    loss: Annotated[float, FileField("loss in FP32, the mean over `batches`")]
    loss_source: Annotated[str, FileField("where the loss came from")]
    fp16: Annotated[LossScale | None, FileField("the loss-scale window; `null`: FP16 was not audited")]
    bf16: Annotated[Bf16Outlook | None, FileField("losses in BF16; `null`: BF16 was not audited")]
    errors: Annotated[Mapping[str, float | None], FileField("by format: relative L2 of all gradients; `null`: failed")]
    modules: Annotated[tuple[ModuleGradients, ...], MeasurementField("gradients of each module's results")] = ()
    parameters: Annotated[tuple[ParameterGradients, ...], MeasurementField("trainable parameters and gradients")] = ()
    nodes: Annotated[tuple[BackwardNode, ...], MeasurementField("the backward pass of every operation")] = ()
    advice: Annotated[tuple[Advice, ...], FileField("recommendations, with the numbers behind them")]
    noise: Annotated[float | None, FileField("difference of FP32's gradients of two batches, over sqrt(2)")] = None
    attribution: Annotated[str | None, FileField("why gradient contributions are missing; `null`: none are")] = None
    returned: Annotated[
        str,
        FileField(
            "the loss's input from the model: one `tensor`, `tensors` in a structure; or the model's "
            "own loss as `attribute` or in a `mapping`",
            choices=("tensor", "tensors", "attribute", "mapping"),
        ),
    ] = "tensor"
    batches: Annotated[int, FileField("number of batches with a measured step", least=1)] = 1
