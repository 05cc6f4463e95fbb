"""The operations of a training step: what their backward passes do alone, in a low step, and to all gradients."""

from __future__ import annotations

from collections.abc import Mapping

from ..errors import first_line
from ..execution.lowstep import spoilt
from ..execution.step import Step, bind_step, run_step
from ..raised import let_through
from ..records import Contribution
from ..records.training import BackwardNode
from .backward import Handed, Tested, backward_errors
from .gradients import attribute_gradients, jumps, rerun


def backward_nodes(first: Step, formats: tuple[str, ...]) -> tuple[tuple[BackwardNode, ...], str | None]:
    """Every operation's backward pass, with what it moves; and why what it moves is missing."""
    tested = backward_errors(first, formats)
    lost = {fmt: spoilt(first, fmt) for fmt in formats}
    handed = {name: {fmt: one.handed for fmt, one in found.items()} for name, found in tested.items()}
    moved, why = _attributed(first, handed, formats)
    if moved and jumps(first.capture):
        moved = rerun(first, moved)
    nodes = []
    for name, found in tested.items():
        reaches = {fmt: one.reaches or _lost(lost[fmt], name, one) for fmt, one in found.items()}
        node = first.capture.nodes[name]
        nodes.append(
            BackwardNode(
                name,
                node.op,
                node.owner,
                node.source,
                errors={fmt: one.error for fmt, one in found.items()},
                contributions=moved.get(name, {}),
                reaches={fmt: parameter for fmt, parameter in reaches.items() if parameter is not None},
                reasons={},
                called_from=node.called_from,
            )
        )
    return tuple(nodes), why


def _lost(spoilt: Mapping[str, str], name: str, one: Tested) -> str | None:
    """The parameter that a step which is all low loses where the operation alone breaks gradients that reach none."""
    return spoilt.get(name) if one.error.overflow or one.error.nan else None


def _attributed(
    first: Step, handed: Mapping[str, Mapping[str, Handed | None]], formats: tuple[str, ...]
) -> tuple[dict[str, dict[str, Contribution]], str | None]:
    if not first.faithful:
        return (
            {},
            "the recorded operations have other gradients than the model, as with an autograd.Function of its own",
        )
    try:
        step = run_step(bind_step(first.capture, first.subject, first.batch, first.seed), create_graph=True)
        return attribute_gradients(step, handed, formats, first.seed), None
    except Exception as error:
        let_through(error)
        return {}, f"an operation has no second derivative ({first_line(error)[:120]})"
