"""The operations of a training step: what their backward passes do, and what that makes of their verdicts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ..judge.verdicts import Judgement
from ..records import Capture, Verdict
from ..records.training import BackwardError, BackwardNode
from .attribution import Moved, attribute_gradients, jumps, rerun
from .backward import Handed, backward_errors, reason_of
from .gradients import Step, bind_step, run_step
from .places import places_of
from .replay import spoilt


def backward_nodes(first: Step, formats: tuple[str, ...]) -> tuple[tuple[BackwardNode, ...], str | None]:
    """Every operation's backward pass, with what it moves and why it is unsafe; and why what it moves is missing."""
    tested = backward_errors(first, formats)
    lost = {fmt: spoilt(first, fmt) for fmt in formats}
    handed = {name: {fmt: one for fmt, (_, one) in found.items()} for name, found in tested.items()}
    moved, why = _attributed(first, handed, formats)
    if moved and jumps(first.capture):
        moved = rerun(first, moved)
    nodes = []
    for name, found in tested.items():
        errors = {}
        for fmt, (error, _) in found.items():
            if error.nonfinite and error.reaches is None:
                error = replace(error, reaches=lost[fmt].get(name))
            errors[fmt] = _with_contribution(error, moved.get(name, {}).get(fmt))
        node = first.capture.nodes[name]
        reasons = {fmt: reason for fmt, error in errors.items() if (reason := reason_of(error, fmt)) is not None}
        nodes.append(BackwardNode(name, node.op, node.owner, node.source, errors, reasons))
    return tuple(nodes), why


def _with_contribution(error: BackwardError, moved: Moved | None) -> BackwardError:
    if moved is None:
        return error
    return replace(error, contribution=moved.both, backward=moved.backward, decided_by=moved.decided_by)


def _attributed(
    first: Step, handed: Mapping[str, Mapping[str, Handed | None]], formats: tuple[str, ...]
) -> tuple[dict[str, dict[str, Moved]], str | None]:
    if not first.faithful:
        return (
            {},
            "the recorded operations have other gradients than the model, as with an autograd.Function of its own",
        )
    try:
        step = run_step(bind_step(first.capture, first.subject, first.batch, first.seed), create_graph=True)
        return attribute_gradients(step, handed, formats, first.seed), None
    except (RuntimeError, NotImplementedError) as error:
        return {}, f"an operation has no second derivative ({str(error).strip().splitlines()[0][:120]})"


def with_backward(judged: Judgement, captured: Capture, nodes: Sequence[BackwardNode], step: Capture) -> Judgement:
    """The verdicts of the audited graph, with those operations unsafe whose backward pass, in the graph of the training
    step, is."""
    places = places_of(captured)
    verdicts = {name: dict(by_format) for name, by_format in judged.verdicts.items()}
    ours = {name: key for key, name in places_of(step).items()}
    for node in nodes:
        name = places.get(ours[node.name])
        if name is None:
            continue
        for fmt, reason in node.reasons.items():
            if judged.exposed[name].get(fmt) and verdicts[name][fmt].verdict != "unsafe":
                verdicts[name][fmt] = Verdict("unsafe", reason, "range")
    return Judgement(verdicts, judged.exposed)
