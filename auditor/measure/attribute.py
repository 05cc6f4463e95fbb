"""How much each node's error moves the model's outputs: to first order, or by running the rest of the model again."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from ..formats.entries import is_plain
from ..ops.nodes import tensors_of
from ..records import Contribution
from .estimates import Estimates, estimate
from .margins import only_choices, through
from .measure import Measurement
from .rerun import PLAIN, Reruns, Yardstick
from .undecided import Undecided


def attribute(
    measurement: Measurement,
    seed: int = 0,
    tick: Callable[[str], None] = lambda name: None,
    yardstick: Yardstick = PLAIN,
) -> dict[str, dict[str, Contribution]]:
    """{node or placeholder: {format: Contribution}}: relative L2 of the outputs, unit 1.

    Nodes without a first-order answer (non-finite, deciding a discrete result, or before what has no derivative) are
    re-run, see undecided.py. See estimates.py for the others.
    """
    estimates = estimate(measurement, seed)
    result: dict[str, dict[str, Contribution]] = {}
    for name in measurement.live:
        result[name] = {fmt: estimates.contribution(name, fmt) for fmt in measurement.formats}
    unseen = _unseen(estimates)
    choosing = only_choices(measurement.capture)
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


def _unseen(estimates: Estimates) -> set[str]:
    """Nodes of which first order says nothing, or not all: no derivative leads from them to all that depends on them."""
    measurement = estimates.measurement
    return {
        name
        for name in measurement.errors
        if name in measurement.blind
        or (not estimates.reached(name) and measurement.capture.nodes[name].floating)
        or not all(x.is_floating_point() and is_plain(x) for x in tensors_of(measurement.values[name])[:1])
    }


def _without_answer(measurement: Measurement, unseen: set[str], fmt: str) -> list[str]:
    found = []
    for name, traces in measurement.traces.items():
        error = measurement.errors[name][fmt]
        if traces[fmt].low is not None or (name in unseen and error.local_error and not error.unsupported):
            found.append(name)
    return found
