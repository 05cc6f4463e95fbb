"""What every operation takes of the user's criteria: by their quadratic forms, or by how they answer to errors that were run."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from ..criteria import Criterion
from ..criteria.forms import Form, across, form_of
from ..criteria.measure import Criteria, Held
from ..formats.entries import entries, is_number, is_plain
from ..formats.metrics import output_error
from ..records import Contribution
from .estimates import Estimates, Target, estimate, lone_views
from .measure import Measurement
from .rerun import Limits, Reruns

EXACT = Limits(most=96, elements=1 << 21)
"""Re-runs of the model's forward in a format, where a criterion has no quadratic form: of a small model, every operation."""

DIRECTIONS = 6
"""Errors that are run in a format of a larger model, to see how a criterion without a quadratic form answers to their like."""

STEPS = 24
"""Sizes of an error at which that is looked up, from the smallest that is asked for to the largest; fewer of large outputs."""

LOOKED_UP = 1 << 25
"""Entries of outputs that are held against a criterion to that end, for each one and format."""

Contributions = dict[str, dict[str, Contribution]]


@dataclass(frozen=True)
class Part:
    """One criterion and its outputs. estimates: shares where it is `linear`, the L2 norm of the outputs' errors elsewhere."""

    criterion: Criterion
    meant: tuple[int, ...]
    estimates: Estimates
    linear: bool


def first_order(measurement: Measurement, criteria: Criteria, seed: int) -> list[Part]:
    """Every criterion with what the passes found of it; one pass serves all that have no form, on the same outputs."""
    live = dict(enumerate(measurement.outputs))
    names = criteria.names
    wanted = []
    for criterion in criteria.all:
        meant = criteria.meant(criterion, names)
        forms = _forms(criterion, criteria, [live[i] for i in meant])
        wanted.append((criterion, meant, forms))
    known: dict[tuple[int, ...], Estimates] = {}
    found = []
    for criterion, meant, forms in wanted:
        outputs = tuple(live[i] for i in meant)
        if forms is not None:
            tied = any(across(criterion, x) for x in outputs)
            estimates = estimate(measurement, seed, Target(outputs, forms, not tied), keep=True)
        elif meant in known:
            estimates = known[meant]
        else:
            estimates = known[meant] = estimate(measurement, seed, Target(outputs, (None,) * len(outputs)), keep=True)
        found.append(Part(criterion, meant, estimates, forms is not None))
    return found


def _forms(criterion: Criterion, criteria: Criteria, outputs: Sequence[torch.Tensor]) -> tuple[Form | None, ...] | None:
    """What shapes the probes of a criterion's outputs; None where it has no quadratic form."""
    numbers = [x for x in outputs if is_number(x)]
    if criterion == criteria.rest:
        whole = math.sqrt(sum(float(_finite(x).square().sum()) for x in numbers))
        if criteria.joint is not output_error or not whole:
            return None
        return tuple((lambda signs: signs / (whole * criterion.limit)) for _ in outputs)
    forms = tuple(form_of(criterion, x) for x in outputs) if len(outputs) == len(numbers) == 1 else ()
    return forms if forms and forms[0] is not None else None


def _finite(x: torch.Tensor) -> torch.Tensor:
    return torch.nan_to_num(entries(x.detach()).double(), nan=0.0, posinf=0.0, neginf=0.0)


def shares(
    measurement: Measurement,
    criteria: Criteria,
    parts: Sequence[Part],
    reruns: Reruns,
    tick: Callable[[str], None],
) -> dict[str, Contribution]:
    """{node or placeholder: what it takes of the criterion that it takes most of}, in the format of the re-runs."""
    fmt = reruns.format
    first = {name: [part.estimates.contribution(name, fmt) for part in parts] for name in measurement.live}
    if all(part.linear for part in parts):
        return {name: _most(parts, found) for name, found in first.items()}
    responses = Responses(measurement, criteria, parts, first, reruns, tick)
    return {name: responses.contribution(name) for name in first}


def _most(parts: Sequence[Part], found: Sequence[Contribution]) -> Contribution:
    """Of contributions to every criterion the one that the largest is to; own and cast are the largest of any."""
    at = max(range(len(parts)), key=lambda i: found[i].isolated)
    return replace(
        found[at],
        own=max(one.own for one in found),
        cast=max(one.cast for one in found),
        criterion=str(parts[at].criterion),
    )


@dataclass
class Responses:
    """How criteria without a quadratic form answer to errors, in one format.

    first: of every value its contributions to all parts. Of a small model every operation is run; of larger ones a few,
    and those errors, made larger or smaller, tell what the criterion makes of an error of any size nearby.
    """

    measurement: Measurement
    criteria: Criteria
    parts: Sequence[Part]
    first: Mapping[str, Sequence[Contribution]]
    reruns: Reruns
    tick: Callable[[str], None]
    ran: dict[str, list[Held]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        outputs = {i: self.reruns.reference[i] for part in self.parts if not part.linear for i in part.meant}
        size = max(1, *(x.numel() for x in outputs.values()))
        self._directions = max(min(LOOKED_UP // (2 * size * STEPS), DIRECTIONS), 2)
        self._steps = max(min(LOOKED_UP // (2 * size * self._directions), STEPS), 3)
        self._errors: list[dict[int, torch.Tensor]] = []
        self._run()
        self._tables = {i: self._table(i) for i, part in enumerate(self.parts) if not part.linear}

    def contribution(self, name: str) -> Contribution:
        """What one value takes of the criterion that it takes most of."""
        if name in self.ran:
            return self._as_run(name)
        return _most(self.parts, [self._answered(i, one) for i, one in enumerate(self.first[name])])

    def _as_run(self, name: str) -> Contribution:
        """As the run says; of what the operation's own error and its result's rounding do, as first order divides it."""
        found = []
        for i, held in enumerate(self.ran[name]):
            predicted, share = self._answered(i, self.first[name][i]), held.share
            part = replace(predicted, isolated=share, decided_by="re-run")
            if self.first[name][i].isolated:
                before = self.first[name][i]
                part = replace(
                    part, own=share * before.own / before.isolated, cast=share * before.cast / before.isolated
                )
            elif share:
                part = replace(part, own=share, cast=share)
            found.append(part)
        return _most(self.parts, found)

    def _run(self) -> None:
        """All operations of a small model, of a larger one a few, spread over the order in which they run."""
        elements = sum(x.numel() for leaves in self.measurement.live.values() for x in leaves)
        views = lone_views(self.measurement)
        names = [name for name in self.measurement.traces if self._moves(name)]
        alone = list({(name in views, views.get(name, name)): name for name in reversed(names)}.values())[::-1]
        exact = elements <= EXACT.elements
        step = 1 if exact else max(len(alone) // self._directions, 1)
        for name in alone[step // 2 :: step][: None if exact else self._directions]:
            if self.reruns.spent >= EXACT.most:
                break
            self.tick(name)
            outputs = self.reruns.outputs(name)
            if outputs is not None:
                self._keep(name, outputs)
        roots = {views[name]: held for name, held in self.ran.items() if name in views}
        self.ran |= {name: roots[views[name]] for name in names if views.get(name) in roots}

    def _moves(self, name: str) -> bool:
        """Whether a run would tell something of it: it stays finite, exists in the format, and moves what has no form."""
        trace, error = self.measurement.traces[name], self.measurement.errors[name]
        if trace[self.reruns.format].low is not None or error[self.reruns.format].unsupported:
            return False
        found = zip(self.parts, self.first[name], strict=True)
        return any(not part.linear and 0 < one.isolated < math.inf for part, one in found)

    def _keep(self, name: str, outputs: list[torch.Tensor]) -> None:
        reference = self.reruns.reference
        held = {one.criterion: one for one in self.criteria.held(reference, outputs)}
        self.ran[name] = [held[part.criterion] for part in self.parts]
        if len(self._errors) < self._directions:
            moving = {i for part in self.parts if not part.linear for i in part.meant}
            gaps = {i: _gap(reference[i], outputs[i]) for i in moving}
            self._errors.append({i: gap for i, gap in gaps.items() if gap is not None})

    def _answered(self, i: int, found: Contribution) -> Contribution:
        """Norms of an output's errors as the shares that errors of that size take."""
        if self.parts[i].linear:
            return found
        table = self._tables[i]
        return replace(
            found, isolated=table.share(found.isolated), own=table.share(found.own), cast=table.share(found.cast)
        )

    def _table(self, i: int) -> Table:
        part = self.parts[i]
        sizes = [x for found in self.first.values() for x in (found[i].isolated, found[i].own, found[i].cast)]
        known = [x for x in sizes if 0 < x < math.inf]
        if not known:
            return Table([], [])
        low, high = math.log(min(known)), math.log(max(known) * 1.001)
        steps = [math.exp(low + (high - low) * j / (self._steps - 1)) for j in range(self._steps)]
        return Table(steps, [self._mean_share(part, size) for size in steps])

    def _mean_share(self, part: Part, size: float) -> float:
        """What errors of this size take, of the kinds that were run, as they are and turned about."""
        reference, found = self.reruns.reference, []
        for gaps in self._errors:
            norm = math.sqrt(sum(float(entries(gaps[i]).double().square().sum()) for i in part.meant if i in gaps))
            for side in (size, -size) if 0 < norm < math.inf else ():
                moved = [x + gaps[i] * (side / norm) if i in gaps else x for i, x in enumerate(reference)]
                found.append(self.criteria.one(part.criterion, reference, moved).share)
        return sum(found) / len(found) if found else 0.0


def _gap(reference: torch.Tensor, low: torch.Tensor) -> torch.Tensor | None:
    """What an error adds to an output; None for one without numbers, 0 where they are not finite."""
    if not (is_number(reference) and is_plain(reference) and reference.shape == low.shape):
        return None
    return torch.nan_to_num(low.to(reference.dtype) - reference, nan=0.0, posinf=0.0, neginf=0.0)


@dataclass(frozen=True)
class Table:
    """Shares at sizes of an error, and between them."""

    sizes: Sequence[float]
    shares: Sequence[float]

    def share(self, size: float) -> float:
        """The share at one size: on a straight line between two, in logarithms where both are above zero."""
        if not self.sizes or not size:
            return 0.0
        if not size < math.inf:
            return size
        at = next((j for j in range(1, len(self.sizes)) if size <= self.sizes[j]), len(self.sizes) - 1)
        (x0, x1), (y0, y1) = self.sizes[at - 1 : at + 1], self.shares[at - 1 : at + 1]
        if y0 > 0 and y1 > 0 and x0 < x1:
            return float(y0 * (y1 / y0) ** (math.log(size / x0) / math.log(x1 / x0)))
        return y0 + (y1 - y0) * (size - x0) / (x1 - x0) if x0 < x1 else y1
