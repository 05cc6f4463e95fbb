"""What the backward passes of a training step make of the verdicts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..formats.table import label
from ..records import Capture, NodeError, Verdict
from ..records.training import BackwardNode
from ..tape.places import places_of
from .verdicts import Judgement


def reasoned(nodes: Sequence[BackwardNode]) -> tuple[BackwardNode, ...]:
    """The operations, each with the reasons why it must not run backwards in a format."""
    found = []
    for node in nodes:
        reasons = {fmt: reason_of(node.errors[fmt], parameter, fmt) for fmt, parameter in node.reaches.items()}
        found.append(replace(node, reasons=reasons))
    return tuple(found)


def reason_of(error: NodeError, reaches: str, fmt: str) -> str:
    """Why an operation must not run backwards in a format that makes the gradient of a parameter non-finite."""
    broken = error.overflow + error.nan
    many = "1 finite gradient" if broken == 1 else f"{broken:,} finite gradients"
    return f"its backward pass turns {many} into Inf or NaN in {label(fmt)}, and the gradient of {reaches} with them"


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
