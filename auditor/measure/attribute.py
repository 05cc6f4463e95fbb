"""How much each node's error moves the model's outputs: to first order, or by running the rest of the model again."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from ..formats.metrics import output_error
from ..formats.table import FORMATS
from ..ops.casting import lowered, raised
from ..raised import let_through
from ..records import Contribution
from ..replay.execute import Rest
from .estimates import estimate
from .measure import Measurement
from .rerun import Limits, chosen

LIMITS = Limits(most=96)
"""Of the model's forward; what cannot be told to first order must be, however large the model is."""


def attribute(
    measurement: Measurement, seed: int = 0, tick: Callable[[str], None] = lambda name: None
) -> dict[str, dict[str, Contribution]]:
    """{node or placeholder: {format: Contribution}}: relative L2 of the outputs, unit 1.

    Nodes without a first-order answer (non-finite, or deciding a discrete result) are re-run: that node low, all else
    FP32. See estimates.py for the others.
    """
    estimates = estimate(measurement, seed)
    result: dict[str, dict[str, Contribution]] = {}
    for name in measurement.live:
        result[name] = {fmt: estimates.contribution(name, fmt) for fmt in measurement.formats}
    rest = Rest(measurement.capture, measurement.flat_inputs, measurement.values)
    for fmt in measurement.formats:
        for name in _undecided(measurement, fmt):
            tick(name)
            result[name][fmt] = _rerun(measurement, rest, name, fmt)
    return result


def _undecided(measurement: Measurement, fmt: str) -> list[str]:
    """Nodes for which no first-order answer exists, those certain to matter first, within LIMITS."""
    found = {name: traces[fmt] for name, traces in measurement.traces.items() if traces[fmt].low is not None}
    return chosen(found, lambda name: found[name].certain, LIMITS)


def _rerun(measurement: Measurement, rest: Rest, name: str, fmt: str) -> Contribution:
    isolated = _error(measurement, rest, name, raised(measurement.traces[name][fmt].low))
    cast = isolated
    if measurement.capture.nodes[name].floating:
        cast = _error(measurement, rest, name, raised(lowered(measurement.values[name], FORMATS[fmt])))
    return Contribution(isolated=isolated, own=isolated, cast=cast, decided_by="re-run")


def _error(measurement: Measurement, rest: Rest, name: str, value: Any) -> float:
    """Error of the outputs once a node's value is another; inf where a finite output turned non-finite."""
    try:
        found = rest.outputs(name, value)
    except Exception as error:  # what follows cannot be computed from this value: its shape, or its entries, do not fit
        let_through(error)
        return math.inf
    return output_error([x.detach() for x in measurement.outputs], found)
