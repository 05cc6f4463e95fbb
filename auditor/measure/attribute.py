"""How much each node's error moves the model's outputs, to first order, and of which nodes first order says nothing."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from ..criteria import Criterion
from ..criteria.forms import Form, across, form_of
from ..criteria.measure import Criteria
from ..numerics.entries import entries, finite, is_number, is_plain
from ..numerics.metrics import output_error
from ..records import Contribution
from .estimates import Estimates, Target, estimate
from .measure import Measurement
from .rerun import PLAIN, Yardstick

Contributions = dict[str, dict[str, Contribution]]


@dataclass(frozen=True)
class FirstOrder:
    """{node or placeholder: {format: Contribution}}: relative L2 of the outputs, unit 1; shares of criteria where there are any.

    unseen: nodes of which first order says nothing, or not all: no derivative leads from them to all that depends on them.
    answers: whether the contributions are what the yardstick measures. Where not, as with criteria without a quadratic form
    or outputs that are no numbers, they only say which nodes to expect most of.
    """

    contributions: Contributions
    unseen: frozenset[str]
    answers: bool


def first_order(measurement: Measurement, seed: int = 0, yardstick: Yardstick = PLAIN) -> FirstOrder:
    """What a few backward passes tell, see estimates.py."""
    criteria = yardstick.distance if isinstance(yardstick.distance, Criteria) else None
    parts = _parts(measurement, criteria) if criteria else {}
    passes = {by: estimate(measurement, seed, target, keep=True) for by, target in parts.items()}
    passes = passes or {"": estimate(measurement, seed)}
    contributions = {
        name: {
            fmt: _most({by: one.contribution(name, fmt) for by, one in passes.items()}) for fmt in measurement.formats
        }
        for name in measurement.live
    }
    outputs = measurement.capture.outputs
    nodes = measurement.capture.nodes
    numbers = any(name not in nodes or nodes[name].floating for name in outputs)
    return FirstOrder(
        contributions, _unseen(measurement, passes.values()), numbers and (criteria is None or bool(parts))
    )


def _parts(measurement: Measurement, criteria: Criteria) -> dict[str, Target]:
    """{criterion: its outputs, and what shapes the probes of each}; none where one has no quadratic form."""
    live = dict(enumerate(measurement.outputs))
    found = {}
    for criterion in criteria.all:
        outputs = tuple(live[i] for i in criteria.meant(criterion, criteria.names))
        forms = _forms(criterion, criteria, outputs)
        if forms is None:
            return {}
        tied = any(across(criterion, x) for x in outputs)
        found[str(criterion)] = Target(outputs, forms, not tied)
    return found


def _forms(criterion: Criterion, criteria: Criteria, outputs: Sequence[torch.Tensor]) -> tuple[Form, ...] | None:
    numbers = [x for x in outputs if is_number(x)]
    if criterion == criteria.rest:
        whole = math.hypot(*(float(finite(entries(x.detach())).double().norm()) for x in numbers))
        if criteria.joint is not output_error or not whole:
            return None
        return tuple((lambda signs: signs / (whole * criterion.limit)) for _ in outputs)
    form = form_of(criterion, outputs[0]) if len(outputs) == len(numbers) == 1 else None
    return None if form is None else (form,)


def _most(found: Mapping[str, Contribution]) -> Contribution:
    """Of contributions to every criterion the largest, with its criterion; own and cast are the largest of any."""
    criterion, most = max(found.items(), key=lambda pair: pair[1].isolated)
    own, cast = max(one.own for one in found.values()), max(one.cast for one in found.values())
    return replace(most, own=own, cast=cast, criterion=criterion)


def _unseen(measurement: Measurement, passes: Collection[Estimates]) -> frozenset[str]:
    return frozenset(
        name
        for name in measurement.errors
        if name in measurement.blind
        or (not any(one.reached(name) for one in passes) and measurement.capture.nodes[name].floating)
        or not all(x.is_floating_point() and is_plain(x) for x in measurement.live[name][:1])
    )
