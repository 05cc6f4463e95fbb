"""What the backward passes of a training step make of the verdicts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..formats.table import label
from ..records import Capture, Verdict
from ..records.training import BackwardError, BackwardNode
from ..tape.places import places_of
from .verdicts import Judgement


def reasoned(nodes: Sequence[BackwardNode]) -> tuple[BackwardNode, ...]:
    """The operations, each with the reasons why it must not run backwards in a format."""
    found = []
    for node in nodes:
        reasons = {fmt: reason for fmt, error in node.errors.items() if (reason := reason_of(error, fmt)) is not None}
        found.append(replace(node, reasons=reasons))
    return tuple(found)


def reason_of(error: BackwardError, fmt: str) -> str | None:
    """Why an operation must not run backwards in a format; None where it may."""
    if error.reaches is None:
        return None
    many = "1 finite gradient" if error.nonfinite == 1 else f"{error.nonfinite:,} finite gradients"
    return (
        f"its backward pass turns {many} into Inf or NaN in {label(fmt)}, and the gradient of {error.reaches} with them"
    )


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
