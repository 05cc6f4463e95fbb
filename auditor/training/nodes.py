"""The operations of a training step: what their backward passes do, and what that makes of their verdicts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from ..fxnodes import packet_name
from ..records import Batch, Capture, Subject, Verdict
from ..verdicts import Judgement
from .attribution import Moved, attribute_gradients, jumps, rerun
from .backward import Handed, backward_errors, reason_of
from .emulate import Emulator, low_step
from .gradients import Step, bind_step, run_step
from .records import BackwardError, BackwardNode


def backward_nodes(
    first: Step, captured: Capture, subject: Subject, batch: Batch, formats: tuple[str, ...], seed: int
) -> tuple[tuple[BackwardNode, ...], str | None]:
    """Every operation's backward pass, with what it moves and why it is unsafe; and why what it moves is missing."""
    tested = backward_errors(first, formats)
    spoilt = {fmt: _spoilt(first, fmt) for fmt in formats}
    handed = {name: {fmt: one for fmt, (_, one) in found.items()} for name, found in tested.items()}
    moved, why = _attributed(captured, subject, batch, handed, formats, seed)
    if moved and jumps(captured):
        moved = rerun(first, moved)
    nodes = []
    for name, found in tested.items():
        errors = {}
        for fmt, (error, _) in found.items():
            if error.nonfinite and error.reaches is None:
                error = replace(error, reaches=spoilt[fmt].get(name))
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
    batch: Batch,
    handed: Mapping[str, Mapping[str, Handed | None]],
    formats: tuple[str, ...],
    seed: int,
) -> tuple[dict[str, dict[str, Moved]], str | None]:
    if not handed:
        return {}, "the graph writes into its own values, so its operations cannot be run again one by one"
    try:
        step = run_step(bind_step(captured, subject.model, batch, seed), create_graph=True)
        return attribute_gradients(step, handed, formats, seed), None
    except (RuntimeError, NotImplementedError) as error:
        return {}, f"an operation has no second derivative ({str(error).strip().splitlines()[0][:120]})"


def _spoilt(step: Step, fmt: str) -> dict[str, str]:
    """{operation: the first parameter with it} where all of the step is low: a finite gradient arrives at the operation,
    and what it hands back is not finite. Empty where the loss itself is not finite."""
    emulator = Emulator(step.capture, "cast", fmt)
    broken: set[str] = set()

    def watch(name: str, index: int, gradient: torch.Tensor) -> None:
        if not bool(torch.isfinite(gradient).all()):
            broken.add(name)

    emulator.watch = watch
    low = low_step(emulator, step.flat, step.parameters, 1.0, step.seed)
    lost = [n for n, g in low.gradients.items() if g is not None and not bool(torch.isfinite(g).all())]
    if low.failure is not None or not math.isfinite(low.loss) or not lost:
        return {}
    broken |= {place.name for place in step.capture.placeholders if place.fqn in lost}
    nodes = step.capture.nodes.values()
    return {n.name: lost[0] for n in nodes if n.name not in broken and not broken.isdisjoint(n.inputs)}


def with_backward(judged: Judgement, captured: Capture, nodes: Sequence[BackwardNode], step: Capture) -> Judgement:
    """The verdicts of the audited graph, with those operations unsafe whose backward pass, in the graph of the training
    step, is."""
    places = _places(captured)
    verdicts = {name: dict(by_format) for name, by_format in judged.verdicts.items()}
    ours = {name: key for key, name in _places(step).items()}
    for node in nodes:
        name = places.get(ours[node.name])
        if name is None:
            continue
        for fmt, reason in node.reasons.items():
            if judged.exposed[name].get(fmt) and verdicts[name][fmt].verdict != "unsafe":
                verdicts[name][fmt] = Verdict("unsafe", reason, "range")
    return Judgement(verdicts, judged.exposed)


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
