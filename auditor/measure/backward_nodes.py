"""The operations of a training step: what their backward passes do alone, in a low step, and to all gradients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ..records.training import BackwardError, BackwardNode
from ..replay.lowered_step import spoilt
from ..replay.step import Step, bind_step, run_step
from .backward import Handed, backward_errors
from .gradients import Moved, attribute_gradients, jumps, rerun


def backward_nodes(first: Step, formats: tuple[str, ...]) -> tuple[tuple[BackwardNode, ...], str | None]:
    """Every operation's backward pass, with what it moves; and why what it moves is missing."""
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
        nodes.append(BackwardNode(name, node.op, node.owner, node.source, errors, {}))
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
