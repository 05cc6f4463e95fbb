"""Plans of quantization schemes: for every layer a scheme or 16 bits, with the fewest bits that meet the error budget."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
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
from ..records import Batch, Score
from ..records.quantization import MIXED, QuantizedLayer, QuantizedPlan
from ..stages import tick
from .costs import half_of, quantized_seconds, seconds
from .scores import InFp32
from .workbench import Workbench, worst_of

RUNS = 48
"""Limit of runs on all calibration inputs that choose the layers of one plan."""

MORE_RUNS = 8
"""Further runs each time that the verification refuses a plan."""

VERIFICATIONS = 8
"""Limit of choices for one plan that are verified; if none is accepted, all layers keep 16 bits."""

CLOSER = 0.99
"""Until a choice is accepted, the error on calibration inputs must be this share of what would have been accepted."""

SPREAD = 0.3
"""Standard deviation of the logarithm of a squared effect in the context of other layers."""

MARGIN = 0.08
"""Choices are not run if their predicted error exceeds the limit by more than this share."""

BINS = 2000
"""Units into which the squared limit is divided to find the best choice."""

MUCH_CLOSER = 0.7
"""After a refusal by the user's score, the error must be this share of the refused plan's."""

DRAWS = 32
"""Draws of the effects in a row that suggest no choice to run, after which the search ends."""

KEPT = 16.0
"""Bits per weight of a layer that is not quantized."""

_EXPERTS = re.compile(r"(.*?[^.]*expert[^.]*)\.\d+\.")
"""The list of a layer's experts, in the path of a layer of one expert."""

Choice = tuple[str, ...]
"""The scheme of each group, or "" for 16 bits."""


@dataclass(frozen=True)
class Option:
    """One scheme for a group. bits: total bits of the group's weights; square: squared effect on the outputs."""

    bits: float
    square: float


@dataclass(frozen=True)
class Group:
    """Layers that must have one scheme. options: {scheme, or "" for 16 bits: Option}; single: sum of effects by scheme."""

    keys: tuple[str, ...]
    elements: int
    options: Mapping[str, Option]
    single: Mapping[str, float]


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

    def bits(self, choice: Choice) -> float:
        """Bits of all weights."""
        return sum(group.options[scheme].bits for group, scheme in zip(self.groups, choice, strict=True))

    def predicted(self, choice: Choice) -> float:
        """Predicted error: the root sum of squares of the groups' effects."""
        return math.sqrt(sum(group.options[s].square for group, s in zip(self.groups, choice, strict=True)))

    def best(self, limit: float) -> Choice:
        """The choice with the fewest bits among those whose error was measured within the limit, after more runs.

        Each run tries what would be best if the squared effects were exact; then, if they were drawn around their values.
        """
        draw, idle = random.Random(0), 0
        while self.left > 0 and idle < DRAWS and limit > 0:
            base = self._within(limit)
            choice = self._solve(
                limit, {key: x * math.exp(draw.gauss(0, SPREAD * bool(idle))) for key, x in self.squares.items()}
            )
            expected = sum(self.squares[i, scheme] for i, scheme in enumerate(choice))
            if choice in self.known or self.bits(choice) >= self.bits(base) or expected > (1 + MARGIN) ** 2 * limit**2:
                idle += 1
            else:
                self._run(choice, base)
                idle = 0
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

    def _solve(self, limit: float, squares: Mapping[tuple[int, str], float]) -> Choice:
        """The choice with the fewest bits whose squares add up to at most the limit's, in units of a 1/BINS of it.

        Source: dynamic programming for the multiple-choice knapsack problem, Kellerer et al., Knapsack Problems (2004).
        """
        fewest, picks = torch.zeros(BINS + 1, dtype=torch.float64), list[torch.Tensor]()
        options = [[s for s in group.options if s in ("", *self.schemes)] for group in self.groups]
        sizes = [[round(min(squares[i, s] / limit**2, 2.0) * BINS) for s in each] for i, each in enumerate(options)]
        for group, each, taken in zip(self.groups, options, sizes, strict=True):
            rows = torch.full((len(each), BINS + 1), math.inf, dtype=torch.float64)
            for row, scheme, size in zip(rows, each, taken, strict=True):
                if size <= BINS:
                    row[size:] = fewest[: BINS + 1 - size] + group.options[scheme].bits
            fewest, pick = rows.min(0)
            picks.append(pick)
        left, result = BINS, list[str]()
        for each, taken, pick in zip(reversed(options), reversed(sizes), reversed(picks), strict=True):
            at = int(pick[left])
            result.append(each[at])
            left -= taken[at]
        return tuple(reversed(result))

    def _run(self, choice: Choice, base: Choice) -> None:
        """Measure a choice; what it adds to the squared error of `base` corrects the squares of the groups it lowers."""
        self.left, self.spent = self.left - 1, self.spent + 1
        tick(f"{self.bits(choice) / sum(group.elements for group in self.groups):.3g} bits")
        self.known[choice] = error = self.measure(choice)
        changed = [(i, a, b) for i, (a, b) in enumerate(zip(base, choice, strict=True)) if a != b]
        lowered = [(i, b) for i, a, b in changed if self.groups[i].options[b].bits < self.groups[i].options[a].bits]
        others = sum(self.squares[i, b] - self.squares[i, a] for i, a, b in changed)
        expected = sum(self.squares[key] for key in lowered)
        added = error**2 - self.known[base] ** 2 - others + expected  # by the groups that it lowers
        for key in lowered:
            share = self.squares[key] / expected if expected > 0 else 1 / len(lowered)
            most = 4 * self.squares[key] or math.inf
            self.squares[key] = min(max(share * added, self.squares[key] / 4), most) if added <= math.inf else most


class _Verified(NamedTuple):
    """What ran a choice, see QuantizedPlan, and its errors on the calibration and on the held-out inputs. score: None if an
    error exceeds the limit, or if plans are not scored."""

    by: str
    measured: float
    held_out: float
    score: Score | None = None


@dataclass(frozen=True)
class QuantizedPlans:
    """Makes the plans of one audit. model: runs the user's model with quantized layers."""

    bench: Workbench
    model: QuantizedModel
    groups: Sequence[Group]
    score: InFp32 | None

    @classmethod
    def of(cls, bench: Workbench, score: InFp32 | None = None) -> QuantizedPlans:
        """For the audited model. score: the FP32 model's, if plans are scored."""
        schemes = bench.options.schemes
        model = QuantizedModel(bench.subject.model)
        if any(SCHEMES[scheme].is_calibrated for scheme in schemes):
            model.calibrate(bench.subject.batches, bench.options.seed)
        return cls(bench, model, groups_of(bench), score)

    def plans(self) -> tuple[QuantizedPlan, ...]:
        """A plan for each scheme, and one that chooses among all of them if there are several."""
        schemes = self.bench.options.schemes if self.groups else ()
        known: dict[Choice, float] = {("",) * len(self.groups): 0.0}
        result = [self._plan(scheme, (scheme,), known) for scheme in schemes]
        return (*result, *([self._plan(MIXED, schemes, known)] if len(schemes) > 1 else []))

    def _plan(self, name: str, schemes: tuple[str, ...], known: dict[Choice, float]) -> QuantizedPlan:
        """The plan with the fewest bits that the verification accepts. known: measured errors, of all plans."""
        subject, limit, groups = self.bench.subject, self.bench.max_error, self.groups
        search = Search(groups, schemes, lambda choice: self.error(self._schemes(choice), subject.batches), known)
        kept = accepted = ("",) * len(groups)
        verified, target = {kept: _Verified("emulation", 0.0, 0.0)}, limit
        while len(verified) <= VERIFICATIONS:
            if accepted != kept or (choice := search.best(target)) == kept:
                search.best(limit)  # runs further choices
                choice = search.safest(limit, accepted)
            if choice in verified:
                break
            verified[choice] = one = self._verify(self._schemes(choice))
            if max(one.measured, one.held_out) <= limit and (one.score is None or one.score.holds):
                accepted = choice
                continue
            search.refused.add(choice)
            share = limit / max(one.measured, one.held_out) if one.score is None else MUCH_CLOSER
            target = CLOSER * min(target, share * known[choice])
            search.left = MORE_RUNS
        choice, layers, one = accepted, self._schemes(accepted), verified[accepted]
        return QuantizedPlan(
            name=name,
            schemes=schemes,
            layers=layers,
            groups=tuple(group.keys for group in groups if len(group.keys) > 1),
            effective_bits=search.bits(choice) / sum(group.elements for group in groups),
            predicted_error=search.predicted(choice),
            single_errors=sum(group.single.get(s, 0.0) for group, s in zip(groups, choice, strict=True)),
            calibration_error=one.measured,
            held_out_error=one.held_out if subject.held_out else None,
            verified_by=one.by,
            score=one.score,
            runs=search.spent,
            time_share=self._time(layers),
            weights_bytes=self._bytes(layers),
            weights_share=self._bytes(layers) / self._bytes({}),
        )

    def _schemes(self, choice: Choice) -> dict[str, str]:
        return {key: scheme for group, scheme in zip(self.groups, choice, strict=True) for key in group.keys}

    def _verify(self, schemes: Mapping[str, str]) -> _Verified:
        subject, by, errors, score = self.bench.subject, "", list[float](), None
        for by in ("torchao", "emulation") if self.model.runs_in_torchao(schemes) else ("emulation",):
            errors = [self.error(schemes, batches, by) for batches in (subject.batches, subject.held_out)]
            if math.isfinite(sum(errors)):
                break
        if self.score is not None and max(errors) <= self.bench.max_error:
            score = self.score.score_of(self.model.model, partial(self.model.under, schemes), self.bench.options)
        return _Verified(by, errors[0], errors[1], score)

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


def _layers(bench: Workbench) -> Iterator[tuple[str, str, Layer]]:
    """Each layer of each recorded path: its operation, its key in a plan, and its record."""
    for capture in [path.capture for path in bench.capture.paths] or [bench.capture]:
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
    effects, allowed, twins = dict[tuple[str, str], dict[str, float]](), dict[str, set[str]](), bench.capture.twins
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
            effect = _effect(bench.measured.quantized[name, scheme], rates) * bench.yardstick.unit
            several = effects.setdefault((key, scheme), {})  # by operation: the same one of two paths counts once
            several[twins.get(name, name)] = max(effect, several.get(twins.get(name, name), 0.0))
    result = []
    for members in nx.connected_components(alike):
        keys, elements = sorted(members), sum(tensors[key].numel() for key in members)
        shared = set.intersection(*(allowed[key] for key in keys))
        each = {s: [x for key in keys for x in effects[key, s].values()] for s in bench.options.schemes if s in shared}
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
