"""How much each node's error moves the model's outputs, to first order, and of which nodes first order says nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from ..criteria import Criterion
from ..criteria.forms import Form, across, form_of
from ..criteria.measure import Criteria
from ..formats.entries import entries, is_number, is_plain
from ..formats.metrics import output_error
from ..records import Contribution
from .estimates import Estimates, Target, estimate, finite
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


@dataclass(frozen=True)
class _Part:
    """A criterion with a quadratic form, its outputs, and what shapes the probes of each."""

    criterion: Criterion
    outputs: tuple[torch.Tensor, ...]
    forms: tuple[Form, ...]


def first_order(measurement: Measurement, seed: int = 0, yardstick: Yardstick = PLAIN) -> FirstOrder:
    """What a few backward passes tell, see estimates.py."""
    criteria = yardstick.distance if isinstance(yardstick.distance, Criteria) else None
    parts = _parts(measurement, criteria) if criteria else None
    passes = [_estimate(measurement, part, seed) for part in parts] if parts else [estimate(measurement, seed)]
    by = [str(part.criterion) for part in parts] if parts else [""]
    contributions = {
        name: {fmt: _most([one.contribution(name, fmt) for one in passes], by) for fmt in measurement.formats}
        for name in measurement.live
    }
    outputs = measurement.capture.outputs
    nodes = measurement.capture.nodes
    numbers = any(name not in nodes or nodes[name].floating for name in outputs)
    return FirstOrder(contributions, _unseen(measurement, passes), numbers and (criteria is None or bool(parts)))


def _parts(measurement: Measurement, criteria: Criteria) -> list[_Part] | None:
    """Every criterion; None where one has no quadratic form."""
    live = dict(enumerate(measurement.outputs))
    found = []
    for criterion in criteria.all:
        outputs = tuple(live[i] for i in criteria.meant(criterion, criteria.names))
        forms = _forms(criterion, criteria, outputs)
        if forms is None:
            return None
        found.append(_Part(criterion, outputs, forms))
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


def _estimate(measurement: Measurement, part: _Part, seed: int) -> Estimates:
    tied = any(across(part.criterion, x) for x in part.outputs)
    return estimate(measurement, seed, Target(part.outputs, part.forms, not tied), keep=True)


def _most(found: Sequence[Contribution], criteria: Sequence[str]) -> Contribution:
    """Of contributions to every criterion the largest, with its criterion; own and cast are the largest of any."""
    at = max(range(len(found)), key=lambda i: found[i].isolated)
    return replace(
        found[at], own=max(one.own for one in found), cast=max(one.cast for one in found), criterion=criteria[at]
    )


def _unseen(measurement: Measurement, passes: Sequence[Estimates]) -> frozenset[str]:
    return frozenset(
        name
        for name in measurement.errors
        if name in measurement.blind
        or (not any(one.reached(name) for one in passes) and measurement.capture.nodes[name].floating)
        or not all(x.is_floating_point() and is_plain(x) for x in measurement.live[name][:1])
    )
