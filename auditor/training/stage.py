"""The training stage: before planning it detects backward failures, after planning it recommends how to train."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ..capture.paths import usable
from ..errors import LoadError
from ..execution.policy import Policy
from ..execution.resolve import resolve
from ..isolation import in_training
from ..numerics.entries import is_plain, over_tensors, tensors_in
from ..numerics.formats import FORMATS, label
from ..numerics.histogram import largest_scale, magnitudes_of, merge_magnitudes, significant, underflow_share
from ..records import Batch, Capture, Magnitudes, Objective, Plan, Subject
from ..records.training import (
    Advice,
    BackwardNode,
    Bf16Outlook,
    LossScale,
    ModuleGradients,
    ParameterGradients,
    Training,
)
from ..rulebook.compiled import Recomputed, unrounded_gradients
from ..rulebook.verdicts import backward_reasons
from ..stages import tick
from .advice import advice_of
from .backward import backward_nodes
from .blame import overflow_of
from .draws import decisive_error, draw_errors, interval_of, side_of
from .recommend import (
    HEADROOM,
    RATES,
    format_to_train_in,
    loss_scale,
    lost_by_adam,
    lost_by_sgd,
    ratios_of,
    tolerated_error,
)
from .replay import Step, bind_step, gradient_error, run_step
from .step import FP32, LOSS, StepPrecision, capture_step, own_step, step_batches, use_own_gradients

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
        steps = []
        batches = usable(captured, replace(subject, batches=step_batches(subject)))
        for batch in batches:
            tick("FP32 step")
            step = use_own_gradients(run_step(bind_step(captured, subject, batch, seed)))
            for name, leaves in step.gradients.items():
                gradients.setdefault(name, []).extend(magnitudes_of(g) for g in leaves if g is not None)
            steps.append(float(step.loss.detach()))
            for name, own in step.by_parameter.items():
                if not bool(torch.isfinite(own).all()):
                    said = f"the gradient of {name} is not finite even in FP32: fix the loss or the inputs first"
                    raise LoadError(said, slug="bad-loss")
            if len(steps) == 1:
                first = step
                tick("backward passes")
                nodes, attribution = backward_nodes(first, formats)
                nodes = backward_reasons(nodes)
            else:
                nodes = _with_batch(nodes, step, formats, len(steps))
    pooled = {name: merge_magnitudes(result) for name, result in gradients.items()}
    places = {place.fqn: place.name for place in captured.placeholders}
    parameters = []
    for name, leaf in first.parameters.items():  # a tied parameter appears once
        gradient, ratios = pooled[places[name]], ratios_of(leaf, first.by_parameter[name])
        module = name.rpartition(".")[0]
        parameters.append(ParameterGradients(name, module, magnitudes_of(leaf), gradient, ratios, low=False))
    return MeasuredStep(captured, formats, first, pooled, tuple(parameters), nodes, attribution, steps)


def conclude(prepared: MeasuredStep, plans: Mapping[str, Plan], preferred: Plan | None) -> Training:
    """Find the usable loss scales in FP16, updates lost in BF16, errors of low-precision steps, and advice.

    preferred: the best plan by the errors of the outputs, whose format is taken if the step can train in it.
    """
    formats = prepared.formats
    trainable = {name: plan for name, plan in plans.items() if plan.holds and plan.has_low}
    lowerings = {fmt: StepPrecision(fmt, trainable.get(f"autocast_{fmt}")) for fmt in formats}
    fmt = "fp16" if "fp16" in formats else formats[0]
    low = low_names(prepared.capture, fmt, lowerings[fmt].precision)
    subject = prepared.first.subject
    by_module = low_by_module(prepared.capture, prepared.gradients, low)
    scale = loss_scale(by_module) if fmt == "fp16" else None
    cast = {place.fqn for place in prepared.capture.placeholders if place.fqn and place.name in low}
    parameters = tuple(replace(parameter, low=parameter.name in cast) for parameter in prepared.parameters)
    with in_training(subject.model):
        tick("low-precision steps")
        errors = {f: _gradient_error(prepared, lowerings[f], 1.0) for f in formats if f != "fp16"}
        if fmt == "fp16":
            errors["fp16"], scale = _at_a_scale(prepared, lowerings["fp16"], scale)
        noise = _noise(prepared.first)
        tolerated = tolerated_error(noise)
        scales = dict.fromkeys(formats, 1.0)  # only FP16 needs a loss scale
        if scale is not None and scale.init:
            scales["fp16"] = scale.init
        # Errors near the tolerated one are measured again at changed weights; the decisive one of all counts.
        draws = {}
        for f, error in errors.items():
            if error is not None:
                draws[f] = draw_errors(prepared.first, lowerings[f], scales[f], error, tolerated)
        draws = {f: drawn for f, drawn in draws.items() if len(drawn) > 1}
        errors = {f: decisive_error(draws[f]) if f in draws else errors[f] for f in formats}
        overflows = [one for f in formats for one in _loss_overflows(prepared, f, scales[f])]
    bf16 = _bf16_outlook(parameters, by_module) if "bf16" in formats else None
    idle = {f for f in formats if f"autocast_{f}" in plans and lowerings[f].plan is None}
    unclear = {f: interval_of(drawn) for f, drawn in draws.items() if side_of(drawn, tolerated) == "unclear"}
    preferred_format = preferred.format if preferred is not None else None
    format, reason = format_to_train_in(
        formats, scale, errors, preferred_format, idle, tolerated=tolerated, unclear=unclear
    )
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
        fp16=scale,
        bf16=bf16,
        errors=errors,
        draws=draws,
        tolerated=tolerated,
        noise=noise,
        advice=(),
        recommendation=reason,
        attribution=prepared.attribution,
        returned=prepared.first.returned,
        inputs=_kind_of_inputs(subject.batches[0]),
        batches=len(prepared.losses),
    )
    return replace(result, advice=(*overflows, *advice_of(result, prepared.capture, lowerings)))


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
    scale = window.init if window is not None and window.init else 1.0
    error = _gradient_error(prepared, low, scale)
    if window is None or window.init is None or error is None or math.isfinite(error):
        return error, window
    for _ in range(QUARTERS):
        scale /= 4
        if (error := _gradient_error(prepared, low, scale)) is not None and math.isfinite(error):
            init = max(window.minimum, scale / HEADROOM) if window.minimum <= scale else None
            blamed = (overflow_of(step, low, 4 * scale)[1] for step in _steps(prepared))
            first = next((module for module in blamed if module is not None), window.largest)
            closed_by = window.closed_by if init else first
            return error, replace(window, maximum=scale, init=init, largest=first, closed_by=closed_by)
    return math.inf, replace(window, init=None)


def _with_batch(
    nodes: tuple[BackwardNode, ...], step: Step, formats: tuple[str, ...], number: int
) -> tuple[BackwardNode, ...]:
    """If a low-precision step on another batch gives non-finite gradients, mark the operations whose backward pass
    turns non-finite there as unsafe."""
    captured, every = step.capture.nodes, step.gradients.items()
    leaves = (g for name, gradients in every if name not in captured or captured[name].owner != LOSS for g in gradients)
    inside = merge_magnitudes(significant(magnitudes_of(g)) for g in leaves if g is not None)
    scale = min(largest_scale(inside, FORMATS["fp16"]) / HEADROOM, 2.0**24)
    low = {fmt: own_step(step, StepPrecision(fmt), scale if FORMATS[fmt].loss_scaling else 1.0) for fmt in formats}
    if not (broken := tuple(fmt for fmt, one in low.items() if one.failure is None and not one.finite)):
        return nodes
    known = {node.name: node for node in nodes}
    for node in backward_reasons(backward_nodes(step, broken)[0]):
        said = {fmt: f"{reason} (batch {number})" for fmt, reason in node.reasons.items()}
        before = known.setdefault(node.name, replace(node, reasons=said))
        known[node.name] = replace(
            before, reasons={**said, **before.reasons}, reaches={**node.reaches, **before.reaches}
        )
    return tuple(known.values())


def _noise(step: Step) -> float | None:
    """Relative difference of FP32's gradients between batches, estimated from the two halves of this batch.

    The mean of two halves' gradients has an error of about half their distance. Returns None for a batch without
    halves."""
    subject = step.subject
    total, *others = {x.shape[0] for x in tensors_in(subject.batches[0]) if x.dim()} or {0}
    if total < 2 or others:
        return None
    parts = (_part(subject, total, rows) for rows in (slice(0, total // 2), slice(total // 2, 2 * (total // 2))))
    halves = [own_step(replace(step, subject=part, batch=step_batches(part)[0]), FP32) for part in parts]
    if any(half.failure is not None for half in halves):
        return None  # the model may accept only the whole batch's size
    one, other = ({name: g for name, g in half.gradients.items() if g is not None} for half in halves)
    apart = [one[name] - other[name] for name in one.keys() & other.keys()]
    size = math.sqrt(sum(float(g.double().square().sum()) for g in step.by_parameter.values()))
    return math.sqrt(sum(float(g.double().square().sum()) for g in apart)) / 2 / size if size else None


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
