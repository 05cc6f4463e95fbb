"""Measures the training step: in FP32 before planning, with its backward passes, and in low precision after planning."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ...capture.paths import usable
from ...errors import LoadError
from ...execution.policy import Policy
from ...execution.resolve import resolve
from ...isolation import in_training
from ...numerics.entries import is_plain, over_tensors, tensors_in
from ...numerics.formats import FORMATS, label
from ...numerics.histogram import largest_scale, magnitudes_of, merge_magnitudes, significant, underflow_share
from ...records import Batch, Capture, Magnitudes, Objective, Plan, Subject
from ...records.training import (
    Advice,
    BackwardNode,
    Bf16Outlook,
    LossScale,
    ModuleGradients,
    ParameterGradients,
    Training,
)
from ...rulebook.compiled import Recomputed, unrounded_gradients
from ...rulebook.verdicts import backward_reasons
from ...stages import tick
from ...training.blame import overflow_of
from ...training.limits import HEADROOM, tolerated_error
from ...training.replay import LowStep, Step, bind_step, gradient_error, run_step
from ...training.step import FP32, LOSS, StepPrecision, capture_step, own_step, step_batches, use_own_gradients
from .advice import advice_of
from .backward import backward_nodes
from .draws import decisive_error, draw_errors, interval_of, side_of
from .recommend import (
    RATES,
    format_to_train_in,
    loss_scale,
    lost_by_adam,
    lost_by_sgd,
    ratios_of,
)

QUARTERS = 12
"""Maximum number of times that the loss scale is divided by four to make gradients finite on every batch."""


@dataclass
class MeasuredStep:
    """Measurements of the training step before planning.

    gradients: {node or placeholder: gradients of its results}, weights by their placeholder. first: the step on the
    first batch, with its graph. parameters: trainable parameters; only `conclude` sets their `low`.
    """

    capture: Capture
    formats: tuple[str, ...]
    first: Step
    gradients: dict[str, Magnitudes]
    parameters: tuple[ParameterGradients, ...]
    nodes: tuple[BackwardNode, ...]
    attribution: str | None
    losses: list[float] = field(default_factory=list)

    def changed_by_compiler(self, captured: Capture) -> Recomputed:
        """Operations of the audited graph whose gradients torch.compile may turn NaN, see `unrounded_gradients`."""

        def range_of(name: str) -> Magnitudes | None:
            tensors = [x for x in tensors_in(self.first.env.get(name)) if x.is_floating_point() and is_plain(x)]
            return magnitudes_of(tensors[0]) if tensors else None

        return unrounded_gradients(captured, self.capture, self.first.gradients.keys(), range_of, self.formats[0])


def prepare(subject: Subject, formats: tuple[str, ...], seed: int) -> MeasuredStep:
    """Run one FP32 step per batch, and test the backward pass of each single operation; the model is restored.

    Raises: CaptureError(slug="capture-failed"), LoadError(slug="bad-loss") if FP32 gradients are not finite.
    """
    with in_training(subject.model):
        tick("capture")
        captured = capture_step(subject, formats, seed)
        gradients: dict[str, list[Magnitudes]] = {}
        losses = list[float]()
        batches = usable(captured, replace(subject, batches=step_batches(subject)))
        for batch in batches:
            tick("FP32 step")
            step = use_own_gradients(run_step(bind_step(captured, subject, batch, seed)))
            for name, leaves in step.gradients.items():
                magnitudes = (magnitudes_of(gradient) for gradient in leaves if gradient is not None)
                gradients.setdefault(name, []).extend(magnitudes)
            losses.append(float(step.loss.detach()))
            _require_finite(step)
            if len(losses) == 1:
                first = step
                tick("backward passes")
                nodes, attribution = backward_nodes(first, formats)
                nodes = backward_reasons(nodes)
            else:
                nodes = _with_batch(nodes, step, formats, len(losses))
    pooled = {name: merge_magnitudes(parts) for name, parts in gradients.items()}
    parameters = _gradients_of_parameters(first, captured, pooled)
    return MeasuredStep(captured, formats, first, pooled, parameters, nodes, attribution, losses)


def _require_finite(step: Step) -> None:
    """Raises: LoadError(slug="bad-loss") if a parameter's FP32 gradient is not finite."""
    for name, gradient in step.by_parameter.items():
        if not bool(torch.isfinite(gradient).all()):
            message = f"the gradient of {name} is not finite even in FP32: fix the loss or the inputs first"
            raise LoadError(message, slug="bad-loss")


def _gradients_of_parameters(
    first: Step, captured: Capture, pooled: Mapping[str, Magnitudes]
) -> tuple[ParameterGradients, ...]:
    """Weights, gradients and updates of all parameters; a tied parameter appears once. pooled: of all batches."""
    places = {place.fqn: place.name for place in captured.placeholders}
    parameters = list[ParameterGradients]()
    for name, leaf in first.parameters.items():
        module = name.rpartition(".")[0]
        gradient = pooled[places[name]]
        ratios = ratios_of(leaf, first.by_parameter[name])
        parameters.append(ParameterGradients(name, module, magnitudes_of(leaf), gradient, ratios, low=False))
    return tuple(parameters)


def conclude(prepared: MeasuredStep, plans: Mapping[str, Plan], preferred: Plan | None) -> Training:
    """Find the usable loss scales in FP16, updates lost in BF16, errors of low-precision steps, and advice.

    preferred: the best plan by the errors of the outputs, whose format is taken if the step can train in it.
    """
    formats = prepared.formats
    trainable = {name: plan for name, plan in plans.items() if plan.holds and plan.has_low}
    lowerings = {fmt: StepPrecision(fmt, trainable.get(f"autocast_{fmt}")) for fmt in formats}
    fmt = "fp16" if "fp16" in formats else formats[0]
    low = low_names(prepared.capture, fmt, lowerings[fmt].precision)
    by_module = low_by_module(prepared.capture, prepared.gradients, low)
    parameters = _mark_low(prepared, low)
    steps = _run_low_steps(prepared, lowerings, by_module)
    bf16 = _bf16_outlook(parameters, by_module) if "bf16" in formats else None

    # Which format to train in.
    idle = {fmt for fmt in formats if f"autocast_{fmt}" in plans and lowerings[fmt].plan is None}
    format, reason = format_to_train_in(
        formats,
        steps.scale,
        steps.errors,
        preferred.format if preferred is not None else None,
        idle,
        tolerated=steps.tolerated,
        unclear=steps.unclear,
    )
    subject = prepared.first.subject
    assert subject.objective is not None
    plan = lowerings[fmt].plan
    result = Training(
        loss=sum(prepared.losses) / len(prepared.losses),
        loss_source=subject.objective.source,
        format=format,
        plan=plan.name if plan else None,
        modules=module_gradients(prepared.capture, prepared.gradients, low),
        parameters=parameters,
        nodes=prepared.nodes,
        fp16=steps.scale,
        bf16=bf16,
        errors=steps.errors,
        draws=steps.draws,
        tolerated=steps.tolerated,
        noise=steps.noise,
        advice=(),
        recommendation=reason,
        attribution=prepared.attribution,
        returned=prepared.first.returned,
        inputs=_kind_of_inputs(subject.batches[0]),
        batches=len(prepared.losses),
    )
    advice = advice_of(result, prepared.capture, lowerings)
    return replace(result, advice=(*steps.overflows, *advice))


def _mark_low(prepared: MeasuredStep, low: Container[str]) -> tuple[ParameterGradients, ...]:
    """The parameters, each with whether its placeholder is in `low`, so that it is cast to low precision."""
    names = {place.fqn for place in prepared.capture.placeholders if place.fqn and place.name in low}
    return tuple(replace(parameter, low=parameter.name in names) for parameter in prepared.parameters)


@dataclass(frozen=True)
class _LowSteps:
    """Results of training steps in low precision.

    errors: {format: relative L2 error of the gradients}, None if the step fails. draws: {format: errors at changed
    weights}, where they decide. scale: usable loss scales in FP16. noise: of FP32's gradients, see `_noise`. tolerated:
    the largest tolerated error. overflows: advice on losses that overflow.
    """

    errors: dict[str, float | None]
    draws: dict[str, tuple[float, ...]]
    scale: LossScale | None
    noise: float | None
    tolerated: float
    overflows: tuple[Advice, ...]

    @property
    def unclear(self) -> dict[str, tuple[float, float]]:
        """{format: interval of the error} of the formats whose draws lie on both sides of the tolerated error."""
        draws = {fmt: drawn for fmt, drawn in self.draws.items() if side_of(drawn, self.tolerated) == "unclear"}
        return {fmt: interval_of(drawn) for fmt, drawn in draws.items()}


def _run_low_steps(
    prepared: MeasuredStep, lowerings: Mapping[str, StepPrecision], by_module: Mapping[str, Magnitudes]
) -> _LowSteps:
    """Run a step in each format. by_module: magnitudes of the low-precision gradients."""
    formats = prepared.formats
    scale = loss_scale(by_module) if "fp16" in formats else None
    with in_training(prepared.first.subject.model):
        tick("low-precision steps")
        errors = {fmt: _gradient_error(prepared, lowerings[fmt], 1.0) for fmt in formats if fmt != "fp16"}
        scales = dict.fromkeys(formats, 1.0)  # only FP16 needs a loss scale
        if "fp16" in formats:
            errors["fp16"], scale = _at_a_scale(prepared, lowerings["fp16"], scale)
        if scale is not None and scale.init:
            scales["fp16"] = scale.init
        noise = _noise(prepared.first)
        tolerated = tolerated_error(noise)

        # Errors near the tolerated one are measured again at changed weights; the decisive one of all counts.
        draws = dict[str, tuple[float, ...]]()
        for fmt, error in errors.items():
            if error is None:
                continue
            drawn = draw_errors(prepared.first, lowerings[fmt], scales[fmt], error, tolerated)
            if len(drawn) > 1:
                draws[fmt] = drawn
                errors[fmt] = decisive_error(drawn)
        overflows = list[Advice]()
        for fmt in formats:
            overflows += _loss_overflows(prepared, fmt, scales[fmt])
    ordered = {fmt: errors[fmt] for fmt in formats}
    return _LowSteps(ordered, draws, scale, noise, tolerated, tuple(overflows))


def _bf16_outlook(parameters: Sequence[ParameterGradients], by_module: Mapping[str, Magnitudes]) -> Bf16Outlook:
    """Gradients that underflow in BF16, and updates that BF16 weights would lose, by optimizer and learning rate."""
    adam = {rate: lost_by_adam(parameters, rate) for rate in RATES}
    sgd = {rate: lost_by_sgd(parameters, rate) for rate in RATES}
    pooled = merge_magnitudes(by_module.values())
    share = underflow_share(pooled.exponents, FORMATS["bf16"])
    return Bf16Outlook(share, adam, sgd)


def _kind_of_inputs(batch: Batch) -> str:
    """`both` positional and keyword arguments, a `dict`, a `tuple`, or one `tensor`."""
    args, kwargs = batch
    if kwargs:
        return "both" if args else "dict"
    return "tensor" if len(args) == 1 else "tuple"


def _loss_overflows(prepared: MeasuredStep, fmt: str, scale: float) -> Iterator[Advice]:
    """Advice if the loss turns Inf or NaN inside an autocast region, where many training loops compute it."""
    inside = StepPrecision(fmt)
    result = own_step(prepared.first, inside, scale)
    if result.failure is not None or math.isfinite(result.loss):
        return
    where, module = overflow_of(prepared.first, inside, scale)
    if module != LOSS:
        return
    yield Advice(
        "loss-overflows",
        f"Compute the loss in FP32 when training in {label(fmt)}",
        f"Inside the autocast region, the loss turns Inf or NaN in {label(fmt)}, first at {where}. Leave the region after "
        "the forward pass, and pass `outputs.float()` to the loss.",
        {"format": fmt, "module": module},
    )


def _gradient_error(prepared: MeasuredStep, low: StepPrecision, scale: float) -> float | None:
    """Relative L2 error of low-precision gradients at a loss scale, on the worst batch; None if a step raises."""
    worst = 0.0
    for step in _steps(prepared):
        result = own_step(step, low, scale)
        if result.failure is not None:
            return None
        worst = max(worst, gradient_error(step.by_parameter, result.gradients))
        if not math.isfinite(worst):
            return math.inf
    return worst


def _steps(prepared: MeasuredStep) -> Iterator[Step]:
    """Run the FP32 step on every usable batch, and yield the results one by one."""
    captured, first = prepared.capture, prepared.first
    yield first
    for batch in usable(captured, replace(first.subject, batches=step_batches(first.subject)))[1:]:
        yield use_own_gradients(run_step(bind_step(captured, first.subject, batch, first.seed)))


def _at_a_scale(
    prepared: MeasuredStep, low: StepPrecision, window: LossScale | None
) -> tuple[float | None, LossScale | None]:
    """The error of an FP16 step at the initial scale, and the usable scales. If gradients overflow, for example in an
    autograd.Function, the scale is divided by four until gradients are finite, and becomes the maximum."""
    scale = 1.0
    if window is not None and window.init:
        scale = window.init
    error = _gradient_error(prepared, low, scale)
    if window is None or window.init is None or error is None or math.isfinite(error):
        return error, window
    for _ in range(QUARTERS):
        scale /= 4
        error = _gradient_error(prepared, low, scale)
        if error is not None and math.isfinite(error):
            return error, _lowered_window(prepared, low, window, scale)
    return math.inf, replace(window, init=None)


def _lowered_window(prepared: MeasuredStep, low: StepPrecision, window: LossScale, scale: float) -> LossScale:
    """The usable loss scales, if `scale` is the largest without an overflow and four times this scale overflows."""
    init = None
    if window.minimum <= scale:
        init = max(window.minimum, scale / HEADROOM)
    overflowing = (overflow_of(step, low, 4 * scale)[1] for step in _steps(prepared))
    largest = next((module for module in overflowing if module is not None), window.largest)
    closed_by = window.closed_by if init else largest
    return replace(window, maximum=scale, init=init, largest=largest, closed_by=closed_by)


def _with_batch(
    nodes: tuple[BackwardNode, ...], step: Step, formats: tuple[str, ...], number: int
) -> tuple[BackwardNode, ...]:
    """If a low-precision step on another batch gives non-finite gradients, mark the operations whose backward pass
    turns non-finite there as unsafe."""
    broken = _broken_formats(step, formats)
    if not broken:
        return nodes
    by_name = {node.name: node for node in nodes}
    for node in backward_reasons(backward_nodes(step, broken)[0]):
        reasons = {fmt: f"{reason} (batch {number})" for fmt, reason in node.reasons.items()}
        before = by_name.setdefault(node.name, replace(node, reasons=reasons))
        by_name[node.name] = replace(
            before,
            reasons={**reasons, **before.reasons},  # those of earlier batches stay
            reaches={**node.reaches, **before.reaches},
        )
    return tuple(by_name.values())


def _broken_formats(step: Step, formats: tuple[str, ...]) -> tuple[str, ...]:
    """The formats in which a step runs, but gives non-finite gradients even at the largest safe loss scale."""
    nodes = step.capture.nodes
    gradients = list[Magnitudes]()
    for name, leaves in step.gradients.items():
        if name in nodes and nodes[name].owner == LOSS:
            continue
        gradients += [significant(magnitudes_of(leaf)) for leaf in leaves if leaf is not None]
    largest = largest_scale(merge_magnitudes(gradients), FORMATS["fp16"])
    scale = min(largest / HEADROOM, 2.0**24)
    broken = list[str]()
    for fmt in formats:
        own_scale = scale if FORMATS[fmt].loss_scaling else 1.0
        low = own_step(step, StepPrecision(fmt), own_scale)
        if low.failure is None and not low.finite:
            broken.append(fmt)
    return tuple(broken)


def _noise(step: Step) -> float | None:
    """Relative difference of FP32's gradients between batches, estimated from the two halves of this batch.

    The mean of two halves' gradients has an error of about half their distance. Returns None for a batch without
    halves."""
    subject = step.subject
    lengths = {x.shape[0] for x in tensors_in(subject.batches[0]) if x.dim()}
    if len(lengths) > 1:
        return None
    total = max(lengths, default=0)
    if total < 2:
        return None
    half = total // 2
    halves = [_half_step(step, _part(subject, total, rows)) for rows in (slice(0, half), slice(half, 2 * half))]
    if any(own.failure is not None for own in halves):
        return None  # the model may accept only the whole batch's size
    first, second = (
        {name: gradient for name, gradient in own.gradients.items() if gradient is not None} for own in halves
    )
    differences = [first[name] - second[name] for name in first.keys() & second.keys()]
    size = _norm(step.by_parameter.values())
    return _norm(differences) / 2 / size if size else None


def _half_step(step: Step, half: Subject) -> LowStep:
    """The FP32 step of a model on half of its batch."""
    return own_step(replace(step, subject=half, batch=step_batches(half)[0]), FP32)


def _norm(gradients: Iterable[torch.Tensor]) -> float:
    """The L2 norm of several tensors, as if they were one."""
    return math.sqrt(sum(float(gradient.double().square().sum()) for gradient in gradients))


def low_names(captured: Capture, fmt: str, precision_of: Callable[[str], str]) -> frozenset[str]:
    """Values with a low-precision gradient under autocast: in low precision, or cast by an operation that reads it."""
    result = resolve(Policy(captured, "autocast", precision_of, fmt))
    return frozenset(name for name in result.dtypes if result.low(name)) | frozenset(result.readers_of_rounded)


def low_by_module(captured: Capture, gradients: Mapping[str, Magnitudes], low: frozenset[str]) -> dict[str, Magnitudes]:
    """Magnitudes of the gradients that each module computes in low precision, including gradients of its parameters."""
    groups = _by_module(captured, (name for name in gradients if name in low))
    return {module: merge_magnitudes(significant(gradients[n]) for n in names) for module, names in groups.items()}


def module_gradients(
    captured: Capture, gradients: Mapping[str, Magnitudes], low: frozenset[str]
) -> tuple[ModuleGradients, ...]:
    """Magnitudes of the gradients of the results of every module's operations; modules in execution order."""
    result = []
    for module, names in _by_module(captured, (name for name in captured.nodes if name in gradients)).items():
        lowered = [significant(gradients[name]) for name in names if name in low]
        both = merge_magnitudes(gradients[name] for name in names), merge_magnitudes(lowered) if lowered else None
        result.append(ModuleGradients(module, *both))
    return tuple(result)


def _by_module(captured: Capture, names: Iterable[str]) -> dict[str, list[str]]:
    """{module: its nodes, and placeholders of its parameters, that are in `names`}."""
    parameters, groups = {place.name: place.fqn or "" for place in captured.placeholders}, dict[str, list[str]]()
    for name in names:
        node = captured.nodes.get(name)
        groups.setdefault(node.owner if node else parameters.get(name, "").rpartition(".")[0], []).append(name)
    return groups


def _part(subject: Subject, total: int, rows: slice) -> Subject:
    def cut(tree: Any) -> Any:
        return over_tensors(lambda x: x[rows] if x.dim() and x.shape[0] == total else x, tree)

    assert subject.objective is not None
    objective = Objective(subject.objective.loss_fn, (cut(subject.objective.targets[0]),), subject.objective.source)
    return replace(subject, batches=(cut(subject.batches[0]),), held_out=(), objective=objective)
