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
    """Gradients of the results of one module's operations, pooled."""

    module: Annotated[str, FileField("path of the module; `(loss)` for operations outside the model")]
    activations: Annotated[Magnitudes, FileField("histogram of the gradients of the module's operations")]
    low: Annotated[
        Magnitudes | None,
        FileField("histogram of the gradients in low precision under autocast, without negligible values"),
    ]


@dataclass(frozen=True)
class ParameterGradients:
    """One parameter: its values, its gradient g, and the size of an update relative to the spacing of BF16.

    Rounding loses the update lr * |g| of an entry with key `k` in `ratios` if lr * 2 ** (k + 1) < 1.
    """

    name: Annotated[str, FileField("name of the parameter in the state dict")]
    module: Annotated[str, FileField("module that uses the parameter; `(loss)` for operations outside the model")]
    weight: Annotated[Magnitudes, FileField("histogram of the parameter's values")]
    gradient: Annotated[Magnitudes, FileField("histogram of the parameter's gradient")]
    ratios: Annotated[Mapping[int, int], FileField("entries by log2(gradient / half the BF16 spacing)", least=1)]
    low: Annotated[bool, FileField("whether the gradient passes through low precision under autocast")]


@dataclass(frozen=True)
class GradientChange:
    """Relative change of the parameter gradients (L2, unit 1) with only one operation in a format."""

    both: Annotated[float, FileField("change of the gradients with both passes of the operation in low precision")]
    backward: Annotated[float, FileField("change of the gradients with only the backward pass in low precision")]


@dataclass(frozen=True)
class BackwardNode:
    """Errors of one operation's backward pass in every format, and their effect on the parameter gradients."""

    name: Annotated[str, FileField("name in the captured graph")]
    op: Annotated[str, FileField("ATen overload")]
    owner: Annotated[str, FileField("module that contains the operation")]
    source: Annotated[str | None, FileField("source line as `file:line`; `null`: unknown")]
    errors: Annotated[Mapping[str, NodeError], FileField("by format: errors of the returned gradients")]
    contributions: Annotated[Mapping[str, GradientChange], FileField("by format: change of the gradients, if run")]
    reaches: Annotated[Mapping[str, str], FileField("by format: a parameter whose gradient becomes Inf or NaN")]
    reasons: Annotated[Mapping[str, str], FileField("by format: why training needs FP32 here, if so")]
    called_from: CalledFrom = None


@dataclass(frozen=True)
class LossScale:
    """The usable loss scales for FP16, all powers of two, and the share of gradients that other scales lose."""

    minimum: Annotated[float, FileField("smallest scale at which at most the share `allowed` becomes zero", exact=True)]
    maximum: Annotated[float, FileField("largest loss scale at which no low-precision gradient overflows", exact=True)]
    init: Annotated[float | None, FileField("initial scale for GradScaler; `null`: no scale is usable", exact=True)]
    flushed_unscaled: Annotated[
        float, FileField("share of low-precision gradients that are zero in FP16 without a scale", least=0, most=1)
    ]
    allowed: Annotated[float, FileField("share of the gradients that may become zero", least=0, most=1, exact=True)]
    closed_by: Annotated[str | None, FileField("if no scale is usable: the module whose gradients overflow first")]
    largest: Annotated[str, FileField("module whose gradients determine `maximum`")]
    starved: Annotated[str | None, FileField("module with the most zeros at `maximum`; `null`: no zeros")]
    flushed: Annotated[Mapping[int, float], FileField("by log2 of scale: share of zeros in FP16", least=0, most=1)]
    subnormal: Annotated[Mapping[int, float], FileField("by log2 of scale: subnormal share in FP16", least=0, most=1)]


@dataclass(frozen=True)
class Bf16Outlook:
    """Share of updates that BF16 weights lose. Adam's first steps change every weight by the learning rate."""

    flushed: Annotated[float, FileField("share of low-precision gradients that BF16 rounds to zero", least=0, most=1)]
    lost_adam: Annotated[Mapping[float, float], FileField("share of updates lost, by Adam's rate", least=0, most=1)]
    lost_sgd: Annotated[Mapping[float, float], FileField("share of updates lost, by SGD's rate", least=0, most=1)]


@dataclass(frozen=True)
class Advice:
    """A recommendation for training, with the measurement behind it."""

    code: Annotated[str, FileField("kind of the recommendation")]
    title: Annotated[str, FileField("the recommendation")]
    text: Annotated[str, FileField("the reason for the recommendation")]
    evidence: Annotated[Mapping[str, Any], FileField("the numbers behind the recommendation, by name")] = empty()


@dataclass(frozen=True, kw_only=True)
class Training:
    """Results of auditing a training step."""

    format: Annotated[str | None, FileField("format to train in; `null`: none is recommended")]
    recommendation: Annotated[
        str, FileField("the reason for `format`, and the scaler to use; without a format, a sentence on why")
    ]
    plan: Annotated[str | None, FileField("name of the plan that `fp16` and `bf16` apply to; `null`: plain autocast")]
    loss: Annotated[float, FileField("loss in FP32, the mean over `batches`")]
    loss_source: Annotated[str, FileField("origin of the loss function")]
    fp16: Annotated[LossScale | None, FileField("usable loss scales in FP16; `null`: FP16 was not audited")]
    bf16: Annotated[Bf16Outlook | None, FileField("updates that are lost in BF16; `null`: BF16 was not audited")]
    errors: Annotated[
        Mapping[str, float | None],
        FileField("by format: gradient error (relative L2), the median of `draws` if there are any; `null`: failed"),
    ]
    draws: Annotated[
        Mapping[str, tuple[float, ...]],
        FileField("by format: gradient errors at slightly changed weights; only where one error does not decide"),
    ] = empty()
    tolerated: Annotated[float, FileField("largest gradient error of a recommended format", least=0)] = 0.1
    modules: Annotated[tuple[ModuleGradients, ...], MeasurementField("gradients by module")] = ()
    parameters: Annotated[tuple[ParameterGradients, ...], MeasurementField("trainable parameters and gradients")] = ()
    nodes: Annotated[tuple[BackwardNode, ...], MeasurementField("the backward pass of every operation")] = ()
    advice: Annotated[tuple[Advice, ...], FileField("recommendations, with the measured numbers behind them")]
    noise: Annotated[float | None, FileField("relative difference of FP32 gradients between batches")] = None
    attribution: Annotated[str | None, FileField("why `contributions` are missing; `null`: none are missing")] = None
    returned: Annotated[
        str,
        FileField(
            "what the model returns for the loss: one `tensor`, several `tensors`, or the model's "
            "own loss as an `attribute` or in a `mapping`",
            choices=("tensor", "tensors", "attribute", "mapping"),
        ),
    ] = "tensor"
    inputs: Annotated[str, FileField("the model's arguments: a `tensor`, a `tuple`, a `dict`, or `both`")] = "tensor"
    batches: Annotated[int, FileField("number of batches on which a training step was measured", least=1)] = 1
