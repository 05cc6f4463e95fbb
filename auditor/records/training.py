"""The nouns of a training audit; every record is frozen and holds data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from .graph import CalledFrom
from .measure import Contribution, Magnitudes, NodeError
from .written import Measured, Written, empty

FlushedUnscaled = Annotated[
    float, Written("share of the low gradients that FP16 turns to zero without a scale", least=0, most=1)
]


@dataclass(frozen=True)
class ModuleGradients:
    """Gradients with respect to what the operations of one module return, and of their weights, all together."""

    module: Annotated[str, Written("path of the module; `(loss)` is what the model does not hold")]
    activations: Annotated[Magnitudes, Written("histogram of the gradients of what its operations return")]
    low: Annotated[Magnitudes | None, Written("of those that autocast makes low, without what FP32 would lose")]


@dataclass(frozen=True)
class ParameterGradients:
    """One parameter: its values, its gradient, and how an update compares with the spacing of BF16.

    An update of size lr * |g| is lost where lr * 2 ** ratio < 1.
    """

    name: Annotated[str, Written("of the parameter, in the state dict")]
    module: Annotated[str, Written("path of the module that reads it; `(loss)` is what the model does not hold")]
    weight: Annotated[Magnitudes, Written("histogram of its values")]
    gradient: Annotated[Magnitudes, Written("histogram of its gradient")]
    ratios: Annotated[Mapping[int, int], Written("by log2 of gradient over half a BF16 spacing: how many", least=1)]
    low: Annotated[bool, Written("its gradient passes through the low format under autocast")]


@dataclass(frozen=True)
class BackwardNode:
    """One operation of the training step, its backward pass alone in every format, and how far it moves the gradients."""

    name: Annotated[str, Written("in the captured graph")]
    op: Annotated[str, Written("ATen overload")]
    owner: Annotated[str, Written("module it belongs to")]
    source: Annotated[str | None, Written("line that wrote it, as for operations")]
    errors: Annotated[Mapping[str, NodeError], Written("by format: what it does to that which it hands to its inputs")]
    contributions: Annotated[Mapping[str, Contribution], Written("by format: how far it moves the gradients")]
    reaches: Annotated[Mapping[str, str], Written("parameter whose gradient turns non-finite with it")]
    reasons: Annotated[Mapping[str, str], Written("why it must not run in the format when training; `null`: it may")]
    called_from: CalledFrom = None


@dataclass(frozen=True)
class LossScale:
    """The window of loss scales for FP16, all powers of two, and what is outside of it."""

    minimum: Annotated[float, Written("the smallest that keeps the flushed share within `allowed`", exact=True)]
    maximum: Annotated[float, Written("the largest at which no low gradient overflows", exact=True)]
    init: Annotated[float | None, Written("what to give GradScaler; `null`: the window is empty", exact=True)]
    flushed_unscaled: FlushedUnscaled
    allowed: Annotated[float, Written("the share that may be flushed", least=0, most=1, exact=True)]
    closed_by: Annotated[str | None, Written("the module whose gradients overflow first, if the window is empty")]
    largest: Annotated[str, Written("module that sets the window's upper end")]
    starved: Annotated[str | None, Written("module that loses most at the upper end; `null`: none loses any")]
    flushed: Annotated[Mapping[int, float], Written("by log2 of the scale: share turned to zero", least=0, most=1)]
    subnormal: Annotated[Mapping[int, float], Written("by log2 of the scale: share with fewer bits", least=0, most=1)]


@dataclass(frozen=True)
class Bf16Outlook:
    """What BF16 loses; Adam's first steps move every weight by the learning rate."""

    flushed: Annotated[float, Written("share of the low gradients that it turns to zero", least=0, most=1)]
    lost_adam: Annotated[
        Mapping[float, float],
        Written("by learning rate of Adam: share of the updates that BF16 weights lose", least=0, most=1),
    ]
    lost_sgd: Annotated[Mapping[float, float], Written("the same for SGD", least=0, most=1)]


@dataclass(frozen=True)
class BatchSize:
    """The same step on the first samples of a batch."""

    samples: Annotated[int, Written("size of the part", least=0)]
    max_gradient: Annotated[float, Written("largest gradient inside the model")]
    gradient_norm: Annotated[float, Written("norm of the parameters' gradients")]
    flushed_unscaled: FlushedUnscaled
    error: Annotated[Mapping[str, float | None], Written("by format: of all parameter gradients under autocast")]


@dataclass(frozen=True)
class Trial:
    """One FP16 step at one loss scale, run for real."""

    scale: Annotated[float, Written("the loss scale", exact=True)]
    flushed: Annotated[float, Written("share of the low gradients that came back as zero", least=0, most=1)]
    predicted: Annotated[float, Written("what the histograms say of it", least=0, most=1)]
    overflow: Annotated[bool, Written("GradScaler would skip the step")]
    predicted_overflow: Annotated[bool, Written("the scale is beyond the window")]
    explained: Annotated[str | None, Written("why overflow was seen and not predicted, or the reverse")] = None


@dataclass(frozen=True)
class Advice:
    """One thing to do about training, with the measurement behind it."""

    code: Annotated[str, Written("its kind")]
    title: Annotated[str, Written("what to do")]
    text: Annotated[str, Written("why")]
    evidence: Annotated[Mapping[str, Any], Written("the numbers by name")] = empty()


@dataclass(frozen=True, kw_only=True)
class Training:
    """What an audit of a training step found."""

    format: Annotated[str | None, Written("format to train in; `null`: FP32")]
    recommendation: Annotated[str, Written("why, and with which scaler, in one sentence")]
    plan: Annotated[str | None, Written("plan whose islands the window holds for; `null`: plain autocast")]
    loss: Annotated[float, Written("its value in FP32, the mean of the `batches`")]
    loss_source: Annotated[str, Written("where the loss came from")]
    fp16: Annotated[LossScale | None, Written("the loss-scale window; `null`: FP16 was not audited")]
    bf16: Annotated[Bf16Outlook | None, Written("what BF16 loses; `null` where it was not audited")]
    errors: Annotated[
        Mapping[str, float | None], Written("by format: relative L2 of all parameter gradients; `null`: it failed")
    ]
    trials: Annotated[tuple[Trial, ...], Measured("FP16 steps that were run, against predictions")] = ()
    modules: Annotated[tuple[ModuleGradients, ...], Measured("gradients of what each module's operations return")] = ()
    parameters: Annotated[tuple[ParameterGradients, ...], Measured("every trainable parameter and its gradient")] = ()
    nodes: Annotated[tuple[BackwardNode, ...], Measured("the backward pass of every operation")] = ()
    batch_sizes: Annotated[tuple[BatchSize, ...], Measured("the same step on parts of the first batch")] = ()
    advice: Annotated[tuple[Advice, ...], Written("what to do, with the numbers that ask for it")]
    attribution: Annotated[
        str | None, Written("why contributions to the gradients are missing; `null`: they are there")
    ] = None
    returned: Annotated[
        str,
        Written(
            "what the model hands to the loss: one `tensor`, `tensors` in a structure; its own loss as `attribute` or"
            " in a `mapping`",
            choices=("tensor", "tensors", "attribute", "mapping"),
        ),
    ] = "tensor"
    batches: Annotated[int, Written("how many batches had a step measured", least=1)] = 1
