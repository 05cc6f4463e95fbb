"""The training stage: before the plans it finds what fails backwards, after them it says how to train."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch

from ..calibrate import usable_batches
from ..errors import LoadError
from ..fxnodes import packet_name
from ..numerics.formats import FORMATS
from ..records import Capture, Plan, Subject, Verdict
from ..resolve import resolve
from ..strategies import plain, running, scoped
from ..verdicts import Judgement
from .advice import advice_of
from .attribution import Moved, attribute_gradients, jumps, rerun
from .backward import Handed, backward_errors, reason_of
from .batches import batch_sizes
from .emulate import Emulator, Precision, gradient_error, low_step
from .gradients import Step, bind_step, capture_step, run_step
from .objective import in_training, step_batches
from .records import (
    BackwardError,
    BackwardNode,
    Bf16Outlook,
    LossScale,
    ModuleGradients,
    ParameterGradients,
    Spread,
    Training,
)
from .spreads import flushed, merged, significant, spread_of
from .trials import trials_of
from .updates import outlook, ratios_of
from .window import loss_scale, scaler_code

Tick = Callable[[str], None]


@dataclass
class Prepared:
    """What is known of the training step before there are plans.

    spreads: {node or placeholder: gradients with respect to its results}, weights by their placeholder. first: the step
    on the first batch, its graph kept.
    """

    subject: Subject
    capture: Capture
    formats: tuple[str, ...]
    seed: int
    first: Step
    spreads: dict[str, Spread]
    weights: dict[str, tuple[Spread, dict[int, int]]]
    nodes: tuple[BackwardNode, ...]
    attribution: str | None
    losses: list[float] = field(default_factory=list)


def prepare(subject: Subject, formats: tuple[str, ...], seed: int, tick: Tick = lambda name: None) -> Prepared:
    """One FP32 step per batch, and every operation's backward pass alone; the model comes back as it was.

    Raises: CaptureError(slug="capture-failed"), LoadError(slug="bad-loss") where FP32 gradients are not finite.
    """
    with in_training(subject.model):
        tick("capture")
        captured = capture_step(subject, formats)
        spreads: dict[str, list[Spread]] = {}
        steps = []
        batches = usable_batches(captured, replace(subject, batches=step_batches(subject)))
        for batch in batches:
            tick("FP32 step")
            step = run_step(bind_step(captured, subject.model, batch, seed))
            for name, gradients in step.gradients.items():
                spreads.setdefault(name, []).extend(spread_of(g) for g in gradients if g is not None)
            steps.append(float(step.loss.detach()))
            _refuse_broken(step)
            if len(steps) == 1:
                first = step
        weights = {
            name: (spread_of(leaf), ratios_of(leaf, first.by_parameter[name]))
            for name, leaf in first.parameters.items()
        }
        tick("backward passes")
        nodes, attribution = _backward_nodes(first, captured, subject, batches[0], formats, seed)
    pooled = {name: merged(found) for name, found in spreads.items()}
    return Prepared(subject, captured, formats, seed, first, pooled, weights, nodes, attribution, steps)


def with_backward(judged: Judgement, captured: Capture, prepared: Prepared) -> Judgement:
    """The verdicts of the audited graph, with those operations unsafe whose backward pass is."""
    places = _places(captured)
    verdicts = {name: dict(by_format) for name, by_format in judged.verdicts.items()}
    ours = {name: key for key, name in _places(prepared.capture).items()}
    for node in prepared.nodes:
        name = places.get(ours[node.name])
        if name is None:
            continue
        for fmt, reason in node.reasons.items():
            if judged.exposed[name].get(fmt) and verdicts[name][fmt].verdict != "unsafe":
                verdicts[name][fmt] = Verdict("unsafe", reason, "range")
    return Judgement(verdicts, judged.exposed)


def conclude(prepared: Prepared, plans: Mapping[str, Plan], recommended: str | None, tick: Tick) -> Training:
    """The loss-scale window under the FP16 plan, what BF16 loses, trial steps, and advice."""
    by_format = {fmt: _usable(plans.get(f"autocast_{fmt}")) for fmt in prepared.formats}
    precisions = {fmt: scoped(plan.scopes) if plan else plain(fmt) for fmt, plan in by_format.items()}
    fmt = "fp16" if "fp16" in prepared.formats else prepared.formats[0]
    low = low_names(prepared.capture, fmt, precisions[fmt])
    scale = loss_scale(low_by_module(prepared.capture, prepared.spreads, low)) if fmt == "fp16" else None
    parameters = _parameters(prepared, low)
    with in_training(prepared.subject.model):
        tick("low steps")
        errors = {f: _gradient_error(prepared, f, precisions[f], scale) for f in prepared.formats}
        trials = trials_of(prepared.first, precisions["fp16"], scale) if scale else ()
        tick("batch sizes")
        sizes = batch_sizes(prepared.subject, prepared.first, errors, precisions)
    bf16 = _bf16(prepared, low, parameters) if "bf16" in prepared.formats else None
    format, reason = _recommend(prepared, scale, errors, recommended)
    assert prepared.subject.objective is not None
    plan = by_format[fmt]
    found = Training(
        loss=sum(prepared.losses) / len(prepared.losses),
        loss_source=prepared.subject.objective.source,
        format=format,
        plan=plan.name if plan else None,
        modules=_modules(prepared, low),
        parameters=parameters,
        nodes=prepared.nodes,
        fp16=scale,
        bf16=bf16,
        errors=errors,
        batch_sizes=sizes,
        trials=trials,
        advice=(),
        recommendation=reason,
        attribution=prepared.attribution,
    )
    return replace(found, advice=advice_of(found, prepared.capture))


def _refuse_broken(step: Step) -> None:
    for name, gradient in step.by_parameter.items():
        if not bool(torch.isfinite(gradient).all()):
            raise LoadError(
                f"the gradient of {name} is not finite in FP32 already: mend the loss or the inputs first",
                slug="bad-loss",
            )


def _backward_nodes(
    first: Step, captured: Capture, subject: Subject, batch: object, formats: tuple[str, ...], seed: int
) -> tuple[tuple[BackwardNode, ...], str | None]:
    tested = backward_errors(first, formats)
    spoilt = {fmt: _spoilt_parameter(first, fmt) for fmt in formats}
    handed = {name: {fmt: one for fmt, (_, one) in found.items()} for name, found in tested.items()}
    moved, why = _attributed(captured, subject, batch, handed, formats, seed)
    if moved and jumps(captured):
        moved = rerun(first, moved)
    nodes = []
    for name, found in tested.items():
        errors = {}
        for fmt, (error, _) in found.items():
            if error.nonfinite and error.reaches is None:
                error = replace(error, reaches=spoilt[fmt])
            errors[fmt] = _with_contribution(error, moved.get(name, {}).get(fmt))
        node = captured.nodes[name]
        reasons = {fmt: reason for fmt, error in errors.items() if (reason := reason_of(error, fmt)) is not None}
        nodes.append(BackwardNode(name, node.op, node.owner, node.source, errors, reasons))
    return tuple(nodes), why


def _with_contribution(error: BackwardError, moved: Moved | None) -> BackwardError:
    if moved is None:
        return error
    return replace(error, contribution=moved.both, backward=moved.backward, decided_by=moved.decided_by)


def _attributed(
    captured: Capture,
    subject: Subject,
    batch: object,
    handed: Mapping[str, Mapping[str, Handed | None]],
    formats: tuple[str, ...],
    seed: int,
) -> tuple[dict[str, dict[str, Moved]], str | None]:
    if not handed:
        return {}, "the graph writes into its own values, so its operations cannot be run again one by one"
    try:
        step = run_step(bind_step(captured, subject.model, batch, seed), create_graph=True)  # type: ignore[arg-type]
        return attribute_gradients(step, handed, formats, seed), None
    except (RuntimeError, NotImplementedError) as error:
        return {}, f"an operation has no second derivative ({str(error).strip().splitlines()[0][:120]})"


def _spoilt_parameter(step: Step, fmt: str) -> str | None:
    """The first parameter whose gradient is not finite where all of the step is low and its loss is finite."""
    low = low_step(Emulator(step.capture, "cast", fmt), step.flat, step.parameters, 1.0, step.seed)
    if low.failure is not None or not math.isfinite(low.loss):
        return None
    return next((n for n, g in low.gradients.items() if g is not None and not bool(torch.isfinite(g).all())), None)


def _usable(plan: Plan | None) -> Plan | None:
    """A plan to train under: one that was verified and runs something low."""
    if plan is None or not plan.verified:
        return None
    return plan if any(choice.precision != "fp32" for choice in plan.scopes.values()) else None


def low_names(captured: Capture, fmt: str, precision_of: Precision) -> frozenset[str]:
    """Values whose gradient is low under autocast: those that are low themselves, or are lowered for a reader."""
    how = running(captured, "autocast", precision_of, fmt)
    found = resolve(captured, how.setting, literals=how.literals)
    return frozenset(name for name in found.dtypes if found.low(name)) | frozenset(found.lowered)


def low_by_module(captured: Capture, spreads: Mapping[str, Spread], low: frozenset[str]) -> dict[str, Spread]:
    """The low gradients of every module, its parameters' among them."""
    groups: dict[str, list[Spread]] = {}
    for name, spread in spreads.items():
        if name in low:
            groups.setdefault(_module(captured, name), []).append(significant(spread))
    return {module: merged(spreads) for module, spreads in groups.items()}


def _module(captured: Capture, name: str) -> str:
    """Module of a node, or of the parameter that a placeholder stands for."""
    if name in captured.nodes:
        return captured.nodes[name].owner
    fqn = next((p.fqn for p in captured.placeholders if p.name == name), None)
    return (fqn or "").rpartition(".")[0]


def _modules(prepared: Prepared, low: frozenset[str]) -> tuple[ModuleGradients, ...]:
    groups: dict[str, list[str]] = {}
    for name in prepared.capture.nodes:
        if name in prepared.spreads:
            groups.setdefault(prepared.capture.nodes[name].owner, []).append(name)
    return tuple(
        ModuleGradients(
            module,
            merged(prepared.spreads[name] for name in names),
            merged(significant(prepared.spreads[name]) for name in names if name in low)
            if low.intersection(names)
            else None,
        )
        for module, names in groups.items()
    )


def _parameters(prepared: Prepared, low: frozenset[str]) -> tuple[ParameterGradients, ...]:
    found = {}
    for place in prepared.capture.placeholders:
        if place.fqn in prepared.weights and place.name in prepared.spreads and place.fqn not in found:
            weight, ratios = prepared.weights[place.fqn]
            module = place.fqn.rpartition(".")[0]
            gradient = prepared.spreads[place.name]
            found[place.fqn] = ParameterGradients(place.fqn, module, weight, gradient, ratios, place.name in low)
    return tuple(found.values())


def _gradient_error(prepared: Prepared, fmt: str, precision_of: Precision, scale: LossScale | None) -> float | None:
    factor = scale.init if fmt == "fp16" and scale is not None and scale.init else 1.0
    first = prepared.first
    emulator = Emulator(prepared.capture, "autocast", fmt, precision_of)
    low = low_step(emulator, first.flat, first.parameters, factor, first.seed)
    return None if low.failure is not None else gradient_error(first.by_parameter, low.gradients)


def _bf16(prepared: Prepared, low: frozenset[str], parameters: tuple[ParameterGradients, ...]) -> Bf16Outlook:
    pool = merged(low_by_module(prepared.capture, prepared.spreads, low).values())
    adam, sgd = outlook(parameters)
    return Bf16Outlook(flushed(pool.exponents, FORMATS["bf16"]), adam, sgd)


def _recommend(
    prepared: Prepared, scale: LossScale | None, errors: Mapping[str, float | None], recommended: str | None
) -> tuple[str | None, str]:
    """The format to train in, and why, in one sentence."""
    finite = {fmt: error for fmt, error in errors.items() if error is not None and math.isfinite(error)}
    if finite and not any(finite.values()):
        return None, "FP32: autocast lowers nothing in this step"
    fp16 = "fp16" in finite and scale is not None and scale.init is not None
    if "bf16" in finite and (not fp16 or (recommended or "").endswith("bf16")):
        return "bf16", f"BF16 without a scaler: {_why_bf16(prepared, scale, fp16, finite)}"
    if fp16 and scale is not None and scale.init is not None:
        return "fp16", (
            f"FP16 with {scaler_code(scale.init)}: scales from {scale.minimum:,.10g} to {scale.maximum:,.10g} overflow "
            f"nothing and keep flushed gradients within {scale.allowed:.0%}"
        )
    return None, "FP32: in no format does one training step give finite gradients"


def _why_bf16(prepared: Prepared, scale: LossScale | None, fp16: bool, finite: Mapping[str, float]) -> str:
    error = f"its gradients differ from FP32's by {finite['bf16']:.2g}"
    if "fp16" not in prepared.formats or scale is None:
        return error
    if scale.closed_by is not None:
        return (
            f"no loss scale suits FP16: {scale.closed_by or 'the model'} overflows beyond {scale.maximum:,.10g}, and "
            f"{scale.minimum:,.10g} is needed to keep flushed gradients within {scale.allowed:.0%}"
        )
    if not fp16:
        return f"an FP16 step gives no finite gradients; {error}"
    needed = f"FP16 would need a loss scale of {scale.minimum:,.10g} to {scale.maximum:,.10g}"
    return f"the recommended plan runs in it, {error}, and {needed}"


def _places(captured: Capture) -> dict[tuple[str, str, str | None, int], str]:
    """{(module, operation, line, how many of these came before): node}; what the two graphs of one model share."""
    seen: dict[tuple[str, str, str | None], int] = {}
    found = {}
    for node in captured.graph_module.graph.nodes:
        if node.op != "call_function":
            continue
        described = captured.nodes[node.name]
        packet = packet_name(node.target)
        key = (described.owner, "batch_norm" if "batch_norm" in packet else packet, described.source)
        found[(*key, seen.setdefault(key, 0))] = node.name
        seen[key] += 1
    return found
