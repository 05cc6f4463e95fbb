"""Estimates the first-order effect ||J d|| of each node's error d on the outputs, from a few vector-Jacobian products
for all nodes. Lists the nodes whose effect is undefined."""

from __future__ import annotations

import math
import statistics
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch

from ..criteria import Criterion
from ..criteria.margins import Form, across, form_of, relative_form
from ..criteria.measure import Criteria
from ..numerics.entries import dense, entries, finite, is_number, is_plain
from ..numerics.formats import FORMATS
from ..numerics.kernels import is_tensor_core
from ..numerics.metrics import output_error
from ..numerics.nodes import operation_of, row_of, target_of, tensors_in, view_source
from ..records import Contribution
from ..stages import beat
from .alone import Trace
from .measure import Measurement
from .probes import Sums, by_level, inner_products, probes
from .rerun import PLAIN, OutputMetric
from .values import GradientPlace, reading

MAX_PROBES = 8
LIGHT = 1 << 24
"""Backward passes count as cheap, and MAX_PROBES run, if all results together have fewer elements than this."""

STORED = 25 << 20
"""Number of elements, 100 MiB, of gradients that are stored, so that an error is computed once for several passes."""

STEPS = 256
"""Backward passes count as slow if recurrent layers have this many steps in total, even if the results are small."""

FEW_PROBES = {1: 4, 2: 3, 3: 3}
"""{number of samples in the batch: maximum number of backward passes, if these are slow}; 2 for more samples."""

ENOUGH = 0.1
"""If passes are slow, no further pass runs once the estimates' median relative standard error is at most this."""


@dataclass
class Estimates:
    """Results of the backward passes, by value, format and kind of error.

    A value is a node's result, under the node's name, or the copy that one product reads, named by `reading`.
    outputs_norm: divisor of effects. at_once: number of passes processed together. passes: {value: numbers of the
    passes that reach it}. returned: {id of an output: its random signs in this pass}, the part of the output's gradient
    that comes from the probe instead of a reader.
    """

    measurement: Measurement
    outputs_norm: float
    at_once: int = 1
    tied: frozenset[str] = frozenset()
    probe: int = 0
    sums: dict[tuple[str, str, str], Sums] = field(default_factory=dict)
    passes: dict[str, set[int]] = field(default_factory=dict)
    returned: dict[int, torch.Tensor] = field(default_factory=dict)

    def contribution(self, name: str, fmt: str) -> Contribution:
        """The effect on the outputs of a value's errors in a format, divided by `outputs_norm`."""
        isolated = self._relative(name, fmt, "isolated")
        own = self._relative(name, fmt, "own")
        cast = self._relative(name, fmt, "cast")

        # The casts of the values that the operation reads. A value with several readers has a copy for this one.
        casts = dict[str, float]()
        shares = dict[str, float]()  # of the effect of the value's cast for all readers
        for source, is_shared in self.measurement.readings.get(name, {}).items():
            key = reading(name, source) if is_shared else source
            casts[source] = self._relative(key, fmt, "cast")
            for_all = self._relative(source, fmt, "cast")
            if is_shared and for_all:
                shares[source] = casts[source] / for_all

        trace = self.measurement.traces.get(name, {}).get(fmt)
        if trace is not None and trace.isolated == "inputs":
            isolated = math.hypot(own, *casts.values())
        return Contribution(isolated, own, cast, reads=shares)

    def scatter(self) -> float:
        """Median relative standard error of the estimates so far; nan if no value has enough estimates."""
        result = [scatter for sums in self.sums.values() if not math.isnan(scatter := sums.scatter())]
        return statistics.median(result) if result else math.nan

    def _relative(self, name: str, fmt: str, kind: str) -> float:
        sums = self.sums.get((name, fmt, kind))
        if sums is None or not self.outputs_norm:
            return 0.0
        ties = 2.0 if name in self.tied and kind != "cast" else 1.0  # h^2 / 3 instead of h^2 / 6: see margins.py
        return math.sqrt(ties * sums.square() / len(self.passes[name])) / self.outputs_norm


@dataclass(frozen=True)
class ProbedOutputs:
    """The outputs that one criterion judges. forms: a Form per output, applied to a probe's signs. samples: whether
    samples are estimated separately.

    tied: operations whose rounding can make candidates of a decision equal.
    """

    outputs: tuple[torch.Tensor, ...]
    forms: tuple[Form, ...]
    samples: bool = True
    tied: frozenset[str] = frozenset()


def estimate(
    measurement: Measurement, seed: int, target: ProbedOutputs | None = None, *, keep: bool = False
) -> Estimates:
    """Estimate the effects of all errors on the outputs: one backward pass per random probe, with hooks on all values.

    target: the outputs of one criterion; only these are probed, with the criterion's quadratic forms, and estimates are
    shares of its limit. Without a target, estimates are relative to the outputs' L2 norm. keep: retain the autograd
    graph for another call.
    """
    probed = measurement.outputs if target is None else target.outputs
    moving = [index for index, x in enumerate(probed) if is_number(x) and x.requires_grad]
    outputs = [probed[index] for index in moving]
    forms = [] if target is None else [target.forms[index] for index in moving]
    batch = None
    if target is None or target.samples:
        batch = _common_length(outputs)
    outputs = [entries(x) for x in outputs]
    outputs_norm = 1.0
    if target is None:
        norms = [float(finite(x.detach()).double().norm()) for x in outputs]
        outputs_norm = math.hypot(*norms)
    passes = _plan_passes(measurement, batch, has_outputs=bool(outputs))
    tied = frozenset[str]() if target is None else target.tied
    estimates = Estimates(measurement, outputs_norm, passes.at_once, tied)
    views = lone_views(measurement)
    hooks = _hooks_of(estimates, views, batch)
    measurement.listeners.update({hook.place: hook for hook in hooks})
    try:
        drawn = probes(outputs, passes.most, seed, forms)
        for index in range(passes.most):
            is_repeated_dear = index > 0 and not passes.are_cheap
            if is_repeated_dear and estimates.scatter() <= ENOUGH:
                break  # before another probe is drawn
            probe = next(drawn)
            estimates.probe = index
            estimates.returned = {id(x): signs for x, signs in zip(outputs, probe.signs, strict=True)}
            ends = _cheap_ends(measurement) if is_repeated_dear else None
            beat()
            is_last = index == passes.most - 1
            torch.autograd.backward(probe.total, retain_graph=keep or not is_last, inputs=ends)
        for hook in hooks:
            hook.add()
    finally:
        measurement.listeners.clear()
    _copy_to_views(estimates, views)
    return estimates


class _Passes(NamedTuple):
    """How many backward passes an estimate runs. most: the largest number. at_once: number of passes whose results are
    added together. are_cheap: whether all `most` passes run; expensive ones run one by one, until the estimate is
    accurate enough."""

    most: int
    at_once: int
    are_cheap: bool


def _plan_passes(measurement: Measurement, batch: int | None, *, has_outputs: bool) -> _Passes:
    are_cheap = measurement.elements < LIGHT and _steps(measurement) < STEPS
    most = 0
    if has_outputs:
        most = MAX_PROBES if are_cheap else FEW_PROBES.get(batch or 1, 2)
    if not are_cheap:
        return _Passes(most, 1, are_cheap)
    fitting = STORED // max(measurement.elements, 1)
    return _Passes(most, max(1, min(most, fitting)), are_cheap)


def _hooks_of(estimates: Estimates, views: Container[str], batch: int | None) -> list[_Hook]:
    """A hook on every value with a gradient, except views that alone read a value. batch: number of samples."""
    measurement = estimates.measurement
    sampled = _values_by_sample(measurement, batch)
    hooks = list[_Hook]()
    for place, shape in measurement.places.items():
        if place.name not in views:
            samples = batch if place.source in sampled else None
            hooks.append(_Hook(estimates, place, shape, samples))
    return hooks


def _copy_to_views(estimates: Estimates, views: Mapping[str, str]) -> None:
    """Give every view that alone reads a value the value's gradients and rounding, since it has no hook of its own."""
    for name, source in views.items():
        estimates.passes[name] = estimates.passes.get(source, set())
        for fmt in estimates.measurement.formats:
            same = estimates.sums.get((source, fmt, "cast"))
            if same is not None:
                estimates.sums[name, fmt, "cast"] = same
                estimates.sums[name, fmt, "isolated"] = same


def _common_length(outputs: Sequence[torch.Tensor]) -> int | None:
    """The length of the first dimension of all outputs; None if they differ, or if an output has no such dimension."""
    lengths = {x.shape[0] if x.dim() and is_plain(x) else None for x in outputs}
    return lengths.pop() if len(lengths) == 1 else None


def _cheap_ends(measurement: Measurement) -> list[torch.Tensor] | None:
    """Leaves that later passes differentiate: all but weights of products, which cost as much as all other gradients.

    The weight of a product has many independent rounding errors, so one pass suffices. Returns None if no leaf is left.
    """
    result, places = list[torch.Tensor](), measurement.capture.placeholders
    weights = {place.name for place in places if place.kind == "parameter"}
    for node in measurement.capture.graph_module.graph.nodes:
        multiplied = any(is_tensor_core(target_of(user)) for user in node.users if user.op == "call_function")
        if node.op in ("placeholder", "get_attr") and not (multiplied and node.name in weights):
            result += [leaf for leaf in measurement.live[node.name] if leaf.requires_grad]
    return [*result, *measurement.anchors] or None


def _values_by_sample(measurement: Measurement, batch: int | None) -> set[str]:
    """Values with one contiguous part per sample: inputs with a row per sample, and results computed from them."""
    inputs = {placeholder.name for placeholder in measurement.capture.placeholders if placeholder.kind == "input"}
    result = {
        name
        for name in inputs
        if any(is_plain(x) and x.dim() and x.shape[0] == batch for x in measurement.live.get(name, []))
    }
    for node in measurement.capture.graph_module.graph.nodes:
        if any(source.name in result for source in node.all_input_nodes):
            result.add(node.name)
    return result


def lone_views(measurement: Measurement) -> dict[str, str]:
    """{view: the viewed value}, if only the view reads that value: both then have the same gradient and rounding."""
    result: dict[str, str] = {}
    for node in measurement.capture.graph_module.graph.nodes:
        source = view_source(node)
        lone = source is not None and len(source.users) == 1
        if source is not None and lone and not any(x.numel() for x in tensors_in(source.meta.get("val"))[1:]):
            result[node.name] = result.get(source.name, source.name)
    return result


class _Hook:
    """Computes squared inner products of a value's gradients with the value's errors."""

    def __init__(self, estimates: Estimates, place: GradientPlace, shape: torch.Size, batch: int | None) -> None:
        self.estimates = estimates
        self.place = place
        self.name, self.source, self.index = place
        self.traces = estimates.measurement.traces.get(self.name, {})
        has_samples = batch and shape and shape[0] % batch == 0
        self.samples = batch if batch and has_samples else 1
        tensors = estimates.measurement.live.get(self.name, [])
        self.output = tensors[self.index] if self.index < len(tensors) else None
        self.waiting: list[torch.Tensor] = []
        self.returned: list[torch.Tensor] = []

    def __call__(self, gradient: torch.Tensor | None) -> None:
        if gradient is None:  # no node reads this result of an operation with several results
            return
        self.waiting.append(dense(gradient.detach()).contiguous())
        signs = self.estimates.returned.get(id(self.output))
        self.returned += [] if signs is None else [signs]
        self.estimates.passes.setdefault(self.name, set()).add(self.estimates.probe)
        if len(self.waiting) == self.estimates.at_once:
            self.add()

    def add(self) -> None:
        """Add the inner products of the waiting gradients to the estimates."""
        measurement = self.estimates.measurement
        value = tensors_in(measurement.values[self.source])[self.index].contiguous()
        batches = [gradients for gradients in (self.waiting, self.returned) if gradients and value.numel()]
        self.waiting = []
        self.returned = []
        if not batches:
            return
        with torch.no_grad():
            stacked = [_stack(gradients) for gradients in batches]
            products = [*self._products(value, *stacked)]
            sums_of_products = by_level([inner for _, _, inner in products])
            for (fmt, kinds, _), sums in zip(products, sums_of_products, strict=True):
                for kind in kinds:
                    self.estimates.sums.setdefault((self.name, fmt, kind), Sums()).add(*sums)

    def _products(
        self, value: torch.Tensor, gradients: torch.Tensor, returned: torch.Tensor | None = None
    ) -> Iterator[tuple[str, tuple[str, ...], torch.Tensor]]:
        """Yield (format, kinds of error with equal values, inner products of the gradients with this error)."""
        measurement = self.estimates.measurement
        yield from self._products_of_roundings(value, gradients, returned)
        for fmt, trace in self.traces.items():
            errors = measurement.alone[fmt].errors(measurement.nodes[self.name], trace, self.index)
            for kind, error in errors:
                yield fmt, (kind,), inner_products(gradients, error, self.samples)[0]
        for scheme, kind, error in measurement.quantized.errors(self.name):
            yield scheme, (kind,), inner_products(gradients, error, self.samples)[0]

    def _products_of_roundings(
        self, value: torch.Tensor, gradients: torch.Tensor, returned: torch.Tensor | None
    ) -> Iterator[tuple[str, tuple[str, ...], torch.Tensor]]:
        """Yield the items of `_products` whose error is only the rounding of the value."""
        formats = self.estimates.measurement.formats
        alike = dict[str, tuple[str, ...]]()  # {format: kinds of error that are this rounding}
        for fmt in formats:
            trace = self.traces.get(fmt, Trace("rounding", "rounding"))
            kinds = list[str]()
            if returned is None:
                kinds.append("cast")
            if trace.isolated == "rounding":
                kinds.append("isolated")
            if trace.own == "rounding":
                kinds.append("own")
            if kinds:
                alike[fmt] = tuple(kinds)
        roundings = [(gradients, alike)]
        if returned is not None:  # operations that read an output in low precision round it
            roundings.append((gradients - returned, dict.fromkeys(formats, ("cast",))))
        for moved, kinds_by_format in roundings:
            rows = [FORMATS[fmt] for fmt in kinds_by_format]
            products = inner_products(moved, value, self.samples, rows)
            for (fmt, same_kinds), inner in zip(kinds_by_format.items(), products, strict=True):
                yield fmt, same_kinds, inner


def _steps(measurement: Measurement) -> int:
    """Sum over recurrent layers of the number of sequential steps, or of samples if there are more samples."""
    result = 0
    for node in measurement.capture.graph_module.graph.nodes:
        if node.op == "call_function" and operation_of(target_of(node)).recurrent:
            read = tensors_in(measurement.values[node.all_input_nodes[0].name])
            result += max((max(x.shape[:-1], default=1) for x in read[:1]), default=0)
    return result


def _stack(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """Tensors [*] as one, [passes, *]; a single one is not copied."""
    if len(gradients) == 1:
        return gradients[0][None]
    return torch.stack([*gradients])


Contributions = dict[str, dict[str, Contribution]]


@dataclass(frozen=True)
class FirstOrder:
    """contributions: {node or placeholder: {format: Contribution}}, as relative L2 error or share of a limit.

    unseen: nodes whose effect is not, or only partly, differentiable. answers: whether contributions are in the error
    budget's unit. If a criterion has no quadratic form, or all outputs are discrete, contributions only rank the nodes.
    quantized: contributions of layers, by scheme; `own`: by the error of the weight alone; `cast`: of the input alone.
    """

    contributions: Contributions
    unseen: frozenset[str]
    answers: bool
    quantized: Contributions


def first_order(measurement: Measurement, seed: int = 0, output_metric: OutputMetric = PLAIN) -> FirstOrder:
    """Contributions of all nodes from a few backward passes, see `estimate`."""
    criteria = output_metric.distance if isinstance(output_metric.distance, Criteria) else None
    parts = _parts(measurement, criteria) if criteria else {}
    passes = {name: estimate(measurement, seed, target, keep=True) for name, target in parts.items()}
    if not passes:
        passes[""] = estimate(measurement, seed)

    def effects(names: Iterable[str], formats: Iterable[str]) -> Contributions:
        result = Contributions()
        for name in names:
            result[name] = {}
            for fmt in formats:
                of_criteria = {criterion: own.contribution(name, fmt) for criterion, own in passes.items()}
                result[name][fmt] = _most(of_criteria)
        return result

    contributions = effects(measurement.values, measurement.formats)
    nodes = measurement.capture.nodes

    def is_unseen(name: str) -> bool:
        """Whether the estimates miss an effect of an operation."""
        if name in measurement.blind or name in measurement.discrete:
            return True
        has_gradient = any(own.passes.get(name) for own in passes.values())
        return nodes[name].floating and not has_gradient

    unseen = frozenset(name for name in measurement.errors if is_unseen(name))
    has_numbers = any(name not in nodes or nodes[name].floating for name in measurement.capture.outputs)
    answers = has_numbers and (criteria is None or bool(parts))
    quantized = effects(measurement.quantized.layers, measurement.quantized.schemes)
    return FirstOrder(contributions, unseen, answers, quantized)


def _parts(measurement: Measurement, criteria: Criteria) -> dict[str, ProbedOutputs]:
    """{criterion: its outputs and the forms of their probes}; empty if any criterion has no quadratic form."""
    live = dict(enumerate(measurement.outputs))
    result = {}
    for criterion in criteria.all():
        outputs = tuple(live[i] for i in criteria.output_indices(criterion, criteria.names))
        forms = forms_of(criterion, criteria, outputs)
        if forms is None:
            return {}
        tied = any(across(criterion, x) for x in outputs)
        pairs = criterion.kind in ("top1", "topk")
        rounding = _rounding(measurement, outputs[0]) if pairs else frozenset[str]()
        result[str(criterion)] = ProbedOutputs(outputs, forms, not tied, rounding)
    return result


def _rounding(measurement: Measurement, output: torch.Tensor) -> frozenset[str]:
    """Names of the operation that computes an output, and of operations after it that only move or cast entries."""
    name = next(n for n in measurement.capture.outputs if any(x is output for x in measurement.live[n]))
    result, node = [name], measurement.nodes[name]
    while node.op == "call_function" and node.all_input_nodes and row_of(node).transparent:
        node = node.all_input_nodes[0]
        result.append(node.name)
    return frozenset(result)


def forms_of(criterion: Criterion, criteria: Criteria, outputs: Sequence[torch.Tensor]) -> tuple[Form, ...] | None:
    """The Forms (see margins.py) of a criterion's probes of these outputs; None for a measure without a Form."""
    numbers = [x for x in outputs if is_number(x)]
    if criterion == criteria.rest_criterion:
        form = relative_form(numbers, criterion.limit) if criteria.joint is output_error else None
        return None if form is None else (form,) * len(outputs)
    form = form_of(criterion, outputs[0]) if len(outputs) == len(numbers) == 1 else None
    return None if form is None else (form,)


def _most(by_criterion: Mapping[str, Contribution]) -> Contribution:
    """The contribution with the largest isolated effect, and its criterion. `own` and `cast`: maxima over criteria."""
    criterion, largest = max(by_criterion.items(), key=lambda pair: pair[1].isolated)
    own = max(effect.own for effect in by_criterion.values())
    cast = max(effect.cast for effect in by_criterion.values())
    return replace(largest, own=own, cast=cast, criterion=criterion)
