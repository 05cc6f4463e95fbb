"""Plans of quantization schemes: for every layer a scheme or 16 bits, with the fewest bits that meet the error budget."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import median
from typing import NamedTuple

import networkx as nx
import torch

from ..errors import let_through
from ..isolation.members import named_tensors
from ..measure.joint import QuantizedModel, key_of
from ..measure.quantized import Layer, fits, layers_of, shape_of
from ..numerics.nodes import view_source
from ..numerics.schemes import SCHEMES
from ..records import Batch, Capture
from ..records.quantization import MIXED, QuantizedLayer, QuantizedPlan
from ..stages import tick
from .costs import half_of, quantized_seconds, seconds
from .workbench import Workbench, worst_of

RUNS = 48
"""Limit of runs on all calibration inputs that choose the layers of one plan."""

MORE_RUNS = 8
"""Further runs each time that the verification refuses a plan."""

VERIFICATIONS = 10
"""Limit of choices for one plan that are verified; if it refuses all, all layers keep 16 bits."""

CLOSER = 0.98
"""Until a choice is accepted, the error on calibration inputs must be this share of what would have been accepted."""

SPREAD = 0.3
"""Relative standard deviation of a predicted change of the squared error, for a group in the context of others."""

UNLIKELY = 0.05
"""Choices are not run if their probability to be within the limit is below this."""

KEPT = 16.0
"""Bits per weight of a layer that is not quantized."""

_EXPERTS = re.compile(r"(.*?[^.]*expert[^.]*)\.\d+\.")
"""The list of a layer's experts, in the path of a layer of one expert."""

Choice = tuple[str, ...]
"""The scheme of each group, or "" for 16 bits."""


@dataclass(frozen=True)
class Option:
    """One scheme for a group. bits: of all its weights together; square: squared effect on the outputs."""

    bits: float
    square: float


@dataclass(frozen=True)
class Group:
    """Layers that must have one scheme. options: {scheme, or "" for 16 bits: Option}; single: sum of effects by scheme."""

    keys: tuple[str, ...]
    elements: int
    options: Mapping[str, Option]
    single: Mapping[str, float]

    def steps(self, schemes: Iterable[str]) -> Iterator[tuple[float, str]]:
        """(squared error per bit saved, scheme) of the steps from 16 bits down the convex hull of these options."""
        at = self.options[""]
        while below := {s: one for s in schemes if (one := self.options.get(s)) and one.bits < at.bits}:
            slopes = {s: max(one.square - at.square, 0.0) / (at.bits - one.bits) for s, one in below.items()}
            best = min(slopes, key=lambda s: (slopes[s], below[s].bits, below[s].square))
            yield slopes[best], best
            at = below[best]


class _Change(NamedTuple):
    """Another scheme for one group. saved: bits; more: squared error added."""

    saved: float
    more: float
    group: int
    scheme: str


@dataclass
class Search:
    """Searches the choice with the fewest bits whose measured error is within a limit.

    measure: error of the outputs on the calibration inputs. known: its results, also of other searches. squares:
    squared effects, corrected by the runs. refused: choices that the verification did not accept.
    """

    groups: Sequence[Group]
    schemes: tuple[str, ...]
    measure: Callable[[Choice], float]
    known: dict[Choice, float]
    left: int = RUNS
    spent: int = 0
    squares: dict[tuple[int, str], float] = field(default_factory=dict)
    refused: set[Choice] = field(default_factory=set)

    def __post_init__(self) -> None:
        for i, group in enumerate(self.groups):
            self.squares |= {(i, scheme): one.square for scheme, one in group.options.items()}

    @cached_property
    def path(self) -> list[Choice]:
        """Choices from all 16 bits to the fewest bits, the step with the least squared error per bit first."""
        steps = [(*step, i) for i, group in enumerate(self.groups) for step in group.steps(self.schemes)]
        result = [("",) * len(self.groups)]
        for _, scheme, i in sorted(steps, key=lambda step: step[0]):
            result.append((*result[-1][:i], scheme, *result[-1][i + 1 :]))
        return result

    def bits(self, choice: Choice) -> float:
        """Bits of all weights."""
        return sum(group.options[scheme].bits for group, scheme in zip(self.groups, choice, strict=True))

    def predicted(self, choice: Choice) -> float:
        """Predicted error: the root sum of squares of the groups' effects."""
        return math.sqrt(sum(group.options[s].square for group, s in zip(self.groups, choice, strict=True)))

    def best(self, limit: float) -> Choice:
        """The choice with the fewest bits among those whose error was measured within the limit, after more runs."""
        self._bisect(limit)
        while self.left > 0 and (choice := self._promising(limit)) is not None:
            self._run(choice, self._within(limit))
        return self._within(limit)

    def safest(self, limit: float, other: Choice) -> Choice:
        """The choice with the least measured error, within the limit, of those with fewer bits than another; else that."""
        fewer = [choice for choice in self._allowed(limit) if self.bits(choice) < self.bits(other)]
        return min(fewer, key=lambda choice: self.known[choice], default=other)

    def _within(self, limit: float) -> Choice:
        return min(self._allowed(limit), key=lambda choice: (self.bits(choice), self.known[choice]))

    def _allowed(self, limit: float) -> list[Choice]:
        schemes = {"", *self.schemes}
        errors = ((choice, error) for choice, error in self.known.items() if choice not in self.refused)
        return [choice for choice, error in errors if error <= limit and schemes.issuperset(choice)]

    def _bisect(self, limit: float) -> None:
        """Run choices of the path, first where the prediction meets the limit, until neighbors enclose it."""
        low, high, scale = 0, len(self.path), 1.0
        while high - low > 1 and self.left > 0:
            below = sum(scale * self.predicted(choice) <= limit for choice in self.path[low + 1 : high])
            at = min(low + max(below, 1), high - 1)
            error = self._run(self.path[at], self.path[low])
            predicted = self.predicted(self.path[at])
            scale = error / predicted if predicted > 0 and math.isfinite(error) else 1.0
            low, high = (at, high) if error <= limit else (low, at)

    def _promising(self, limit: float) -> Choice | None:
        """The choice that differs from the best so far in one or two groups, and is expected to save most: bits saved
        times the probability that its error is within the limit; None if none is likely enough."""
        base, down, up = self._within(limit), list[_Change](), [_Change(0.0, 0.0, -1, "")]
        for (i, scheme), square in self.squares.items():
            if scheme != base[i] and scheme in ("", *self.schemes):
                options, more = self.groups[i].options, square - self.squares[i, base[i]]
                change = _Change(options[base[i]].bits - options[scheme].bits, more, i, scheme)
                (down if change.saved > 0 else up).append(change)
        if not down:
            return None
        a, b = (torch.tensor([one[:3] for one in some], dtype=torch.float64).T for some in (down, up))
        saved, spare = a[0][:, None] + b[0], limit**2 - self.known[base] ** 2 - (a[1][:, None] + b[1])
        size = a[1].abs()[:, None] + b[1].abs()
        likely = torch.special.ndtr(spare / (SPREAD * size).clamp(min=1e-300))
        value = (saved * likely).masked_fill((likely < UNLIKELY) | (saved <= 0) | (a[2][:, None] == b[2]), 0.0)
        for at in value.flatten().topk(min(value.numel(), len(self.known) + 1)).indices.tolist():
            moves = {one.group: one.scheme for one in (down[at // len(up)], up[at % len(up)])}
            choice = tuple(moves.get(i, scheme) for i, scheme in enumerate(base))
            if value.flatten()[at] > 0 and choice not in self.known:
                return choice
        return None

    def _run(self, choice: Choice, base: Choice) -> float:
        """Measure a choice; what differs from the prediction counts to the groups that it lowers from `base`."""
        if choice in self.known:
            return self.known[choice]
        self.left, self.spent = self.left - 1, self.spent + 1
        tick(f"{self.bits(choice) / sum(group.elements for group in self.groups):.3g} bits")
        self.known[choice] = error = self.measure(choice)
        changed = [i for i, (a, b) in enumerate(zip(choice, base, strict=True)) if a != b]
        lowered = [i for i in changed if self.groups[i].options[choice[i]].bits < self.groups[i].options[base[i]].bits]
        if math.isfinite(error) and len(changed) <= 2 and len(lowered) == 1:
            others = sum(self.squares[i, choice[i]] - self.squares[i, base[i]] for i in changed if i not in lowered)
            (i,) = lowered
            own = error**2 - self.known[base] ** 2 - others + self.squares[i, base[i]]
            self.squares[i, choice[i]] = max(own, 0.0)
        return error


@dataclass(frozen=True)
class QuantizedPlans:
    """Makes the plans of one audit. model: runs the user's model with quantized layers."""

    bench: Workbench
    model: QuantizedModel
    groups: Sequence[Group]

    @classmethod
    def of(cls, bench: Workbench) -> QuantizedPlans:
        """For the audited model."""
        schemes = bench.options.schemes
        model = QuantizedModel(bench.subject.model)
        if any(SCHEMES[scheme].is_calibrated for scheme in schemes):
            model.calibrate(bench.subject.batches, bench.options.seed)
        return cls(bench, model, groups_of(bench))

    def plans(self) -> tuple[QuantizedPlan, ...]:
        """A plan for each scheme, and one that chooses among all of them if there are several."""
        schemes = self.bench.options.schemes
        known: dict[Choice, float] = {("",) * len(self.groups): 0.0}
        result = [self._plan(scheme, (scheme,), known) for scheme in schemes]
        return (*result, *([self._plan(MIXED, schemes, known)] if len(schemes) > 1 else []))

    def _plan(self, name: str, schemes: tuple[str, ...], known: dict[Choice, float]) -> QuantizedPlan:
        """The plan with the fewest bits that the verification accepts. known: measured errors, of all plans."""
        subject, limit, groups = self.bench.subject, self.bench.max_error, self.groups
        search = Search(groups, schemes, lambda choice: self.error(self._schemes(choice), subject.batches), known)
        kept = accepted = ("",) * len(groups)
        verified, target = {kept: ("emulation", 0.0, 0.0)}, limit
        while len(verified) <= VERIFICATIONS:
            if (choice := search.best(target) if accepted == kept else kept) == kept:
                choice = search.safest(limit, accepted)
            if choice in verified:
                break
            verified[choice] = self._verify(self._schemes(choice))
            if (worst := max(verified[choice][1:])) <= limit:
                accepted = choice
                continue
            search.refused.add(choice)
            target = CLOSER * min(target, search.known[choice] * limit / worst)
            search.left = MORE_RUNS
        choice = accepted
        layers, (by, measured, held_out) = self._schemes(choice), verified[choice]
        return QuantizedPlan(
            name=name,
            schemes=schemes,
            layers=layers,
            groups=tuple(group.keys for group in groups if len(group.keys) > 1),
            effective_bits=search.bits(choice) / sum(group.elements for group in groups),
            predicted_error=search.predicted(choice),
            single_errors=sum(group.single.get(s, 0.0) for group, s in zip(groups, choice, strict=True)),
            calibration_error=measured,
            held_out_error=held_out if subject.held_out else None,
            verified_by=by,
            holds=True,
            runs=search.spent,
            time_share=self._time(layers),
            weights_bytes=self._bytes(layers),
            weights_share=self._bytes(layers) / self._bytes({}),
        )

    def _schemes(self, choice: Choice) -> dict[str, str]:
        return {key: scheme for group, scheme in zip(self.groups, choice, strict=True) for key in group.keys}

    def _verify(self, schemes: Mapping[str, str]) -> tuple[str, float, float]:
        """What ran the plan, see QuantizedPlan, and its errors on the calibration and on the held-out inputs."""
        subject, by, errors = self.bench.subject, "", list[float]()
        for by in ("torchao", "emulation") if self.model.runs_in_torchao(schemes) else ("emulation",):
            errors = [self.error(schemes, batches, by) for batches in (subject.batches, subject.held_out)]
            if math.isfinite(sum(errors)):
                break
        return by, errors[0], errors[1]

    def error(self, schemes: Mapping[str, str], batches: Sequence[Batch], by: str = "emulation") -> float:
        """Measured error with these layers quantized, worst batch; inf if the model raises. by: see QuantizedPlan."""
        if not any(schemes.values()):
            return 0.0
        bench, errors = self.bench, list[float]()
        try:
            for batch in batches:
                outputs = self.model.outputs(schemes, batch, bench.options.seed, by)
                errors.append(bench.yardstick.distance(bench.reference(batch), outputs))
        except Exception as error:
            let_through(error)
            return math.inf
        return worst_of(errors)

    def _bytes(self, schemes: Mapping[str, str]) -> float:
        """Bytes of all parameters and buffers."""
        result = 0.0
        named = {id(tensor): (key_of(name), tensor) for name, tensor in named_tensors(self.bench.subject.model)}
        for key, tensor in named.values():
            scheme, is_float = schemes.get(key), tensor.is_floating_point()
            bits = SCHEMES[scheme].weight.bits if scheme else KEPT if is_float else 8 * tensor.itemsize
            result += tensor.numel() * bits / 8
        return result

    def _time(self, schemes: Mapping[str, str]) -> float | None:
        """Predicted time of a forward, divided by that in 16 bits."""
        device, whole, left = self.bench.options.figures, 0.0, 0.0
        keys = {name: (key, layer) for name, key, layer in _layers(self.bench)}
        for name, cost in self.bench.costs.items():
            own = seconds(cost, half_of(device), device)
            key, layer = keys.get(name, ("", None))
            whole += own
            if layer is not None and (scheme := schemes.get(key)):
                own = quantized_seconds(cost, shape_of(layer.weight).numel(), SCHEMES[scheme], device)
            left += own
        return left / whole if whole else None


def _captures(bench: Workbench) -> Sequence[Capture]:
    return [path.capture for path in bench.capture.paths] or [bench.capture]


def _layers(bench: Workbench) -> Iterator[tuple[str, str, Layer]]:
    """Each layer of each recorded path: its operation, its key in a plan, and its record."""
    for capture in _captures(bench):
        names = {place.name: place.fqn for place in capture.placeholders}
        for name, layer in layers_of(capture).items():
            if (parameter := names[layer.parameter.name]) is not None:
                yield name, key_of(parameter), layer


def groups_of(bench: Workbench) -> list[Group]:
    """The groups of layers that must have one scheme, with their options.

    A group has all layers that read one weight; the linear layers of one module that read the same value, such as q, k
    and v, or gate and up; and all linear layers of the experts in one list. Ungrouped layers are groups of one.
    """
    names: dict[int, list[str]] = {}
    tensors = dict[str, torch.Tensor]()
    for name, tensor in named_tensors(bench.subject.model):
        names.setdefault(id(tensor), []).append(key_of(name))
        tensors[key_of(name)] = tensor
    alike, readers = nx.Graph(), dict[tuple[str, str], str]()
    effects, allowed = dict[tuple[str, str], list[float]](), dict[str, set[str]]()
    rates = _rates(bench.measured.quantized.values())
    for name, key, layer in _layers(bench):
        fitting = {s for s in bench.options.schemes if fits(layer, s)}
        allowed[key] = allowed.get(key, fitting) & fitting
        alike.add_node(key)
        source, parent = layer.given, key.rpartition(".")[0]
        if source is not None and not layer.spatial and parent:
            while (viewed := view_source(source)) is not None:
                source = viewed
            alike.add_edge(key, readers.setdefault((parent, source.name), key))
        if expert := _EXPERTS.match(key):
            alike.add_edge(key, readers.setdefault((expert[1], ""), key))
        for scheme in fitting:
            measured = bench.measured.quantized[name, scheme]
            effects.setdefault((key, scheme), []).append(_effect(measured, rates) * bench.yardstick.unit)
    result = []
    for members in nx.connected_components(alike):
        keys, elements = sorted(members), sum(tensors[key].numel() for key in members)
        shared = set.intersection(*(allowed[key] for key in keys))
        each = {s: [x for key in keys for x in effects[key, s]] for s in bench.options.schemes if s in shared}
        finite = {s: one for s, one in each.items() if math.isfinite(sum(one))}
        options = {s: Option(SCHEMES[s].weight.bits * elements, math.hypot(*one) ** 2) for s, one in finite.items()}
        if shared:
            everyone = tuple(dict.fromkeys(other for key in keys for other in names[id(tensors[key])]))
            sums = {s: sum(one) for s, one in finite.items()}
            result.append(Group(everyone, elements, {"": Option(KEPT * elements, 0.0), **options}, sums))
    return result


def _rates(layers: Iterable[QuantizedLayer]) -> dict[str, float]:
    """{scheme: median ratio of measured to first-order effects}, for effects that no run measured."""
    ratios: dict[str, list[float]] = {}
    for layer in layers:
        ranked = math.hypot(layer.weight_effect, layer.activation_effect)
        if layer.decided_by == "re-run" and ranked > 0 and math.isfinite(layer.effect):
            ratios.setdefault(layer.scheme, []).append(layer.effect / ranked)
    return {scheme: median(each) for scheme, each in ratios.items()}


def _effect(layer: QuantizedLayer, rates: Mapping[str, float]) -> float:
    """The effect of a layer; an unknown one is estimated from its first-order rank."""
    if layer.decided_by != "not-run":
        return layer.effect
    return math.hypot(layer.weight_effect, layer.activation_effect) * rates.get(layer.scheme, 1.0)
