"""How much each node's error moves the model's outputs: to first order, or by running the rest of the model again."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from ..criteria.measure import Criteria
from ..formats.entries import is_plain
from ..ops.casting import raised
from ..records import Contribution
from .estimates import Estimates, estimate
from .margins import only_choices, through
from .measure import Measurement
from .rerun import PLAIN, Reruns, Yardstick
from .shares import first_order, shares
from .singular import divides_alike
from .undecided import Undecided


def attribute(
    measurement: Measurement,
    seed: int = 0,
    tick: Callable[[str], None] = lambda name: None,
    yardstick: Yardstick = PLAIN,
) -> dict[str, dict[str, Contribution]]:
    """{node or placeholder: {format: Contribution}}: relative L2 of the outputs, unit 1; shares of criteria where there are any.

    Nodes without a first-order answer (non-finite, deciding a discrete result, or before what has no derivative) are
    re-run, see undecided.py. See estimates.py for the others.
    """
    choosing = only_choices(measurement.capture)
    result: dict[str, dict[str, Contribution]] = {name: {} for name in measurement.live}
    if isinstance(yardstick.distance, Criteria) and not choosing:
        parts = first_order(measurement, yardstick.distance, seed)
        passes = [part.estimates for part in parts]
        for fmt in measurement.formats:
            reruns = Reruns(measurement, fmt, yardstick)
            for name, one in shares(measurement, yardstick.distance, parts, reruns, tick).items():
                result[name][fmt] = one
    else:
        passes = [estimate(measurement, seed)]
        for name in measurement.live:
            result[name] = {fmt: passes[0].contribution(name, fmt) for fmt in measurement.formats}
    unseen = _unseen(measurement, passes)
    for fmt in measurement.formats:
        first = {name: result[name][fmt] for name in measurement.traces}
        levels = _levels(measurement, first, unseen) if choosing else {}
        if choosing:
            result |= {name: {**result[name], fmt: Contribution(0.0, 0.0, 0.0)} for name in result}
            first = {name: result[name][fmt] for name in first}
        undecided = Undecided(Reruns(measurement, fmt, yardstick), first, unseen, tick, levels)
        for name, found in undecided.decide(_without_answer(measurement, unseen, fmt)).items():
            result[name][fmt] = found
    return result


def _levels(measurement: Measurement, first: Mapping[str, Contribution], unseen: Collection[str]) -> dict[str, float]:
    """{node: how far it moves what decides the outputs} for those whose errors reach them there and nowhere before."""
    eligible = through(measurement.capture) - set(unseen)
    return {name: one.isolated for name, one in first.items() if name in eligible}


def _unseen(measurement: Measurement, passes: Sequence[Estimates]) -> set[str]:
    """Nodes of which first order says nothing, or not all: no derivative leads from them to all that depends on them."""
    return {
        name
        for name in measurement.errors
        if name in measurement.blind
        or (not any(one.reached(name) for one in passes) and measurement.capture.nodes[name].floating)
        or not all(x.is_floating_point() and is_plain(x) for x in measurement.live[name][:1])
    }


def _without_answer(measurement: Measurement, unseen: set[str], fmt: str) -> list[str]:
    found = []
    nodes = {node.name: node for node in measurement.capture.graph_module.graph.nodes}
    for name, traces in measurement.traces.items():
        error, trace = measurement.errors[name][fmt], traces[fmt]
        if trace.vanished and name not in unseen:
            if not divides_alike(nodes[name], raised(trace.low), measurement.values):
                found.append(name)
        elif trace.low is not None or (name in unseen and error.local_error and not error.unsupported):
            found.append(name)
    return found
