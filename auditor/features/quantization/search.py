"""Plans of quantization schemes: for every layer a scheme or 16 bits, with the fewest bits that meet the error budget."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import networkx as nx
import torch

from ...errors import let_through
from ...isolation.members import named_tensors
from ...measure.layers import ChoiceRun, QuantizedModel, change_of, spans_of
from ...measure.quantized import Layer, fits, key_of, layers_of, multiplied_weights
from ...numerics.nodes import shape, view_source
from ...numerics.schemes import SCHEMES
from ...plan.context import PlanningContext, worst_of
from ...plan.costs import half_of, quantized_seconds, seconds
from ...plan.search import MARGIN
from ...records import Batch
from ...records.quantization import MIXED, QuantizedPlan
from .choices import Choice, Group, Search, Verified, bits_of
from .unseen import Pair, bound_of

MORE_RUNS = 4
"""Minimum number of further runs that the search may make after each verification."""

VERIFICATIONS = 20
"""Maximum number of choices that are verified for one plan; if all are refused, all layers keep 16 bits."""

REFUSED = 1.25
"""The error, in units of the limit, of a choice that the score refuses, or whose error is not finite."""

_EXPERTS = re.compile(r"(.*?[^.]*expert[^.]*)\.\d+\.")
"""Matches the list of experts in the module path of a layer that belongs to one expert."""


class _Errors(NamedTuple):
    """Errors on the calibration and the held-out inputs; worst: the larger one, or the bound for unseen inputs in units of
    the margin."""

    measured: float
    held_out: float
    worst: float


class QuantizedPlans:
    """Makes the plans of one audit. model: runs the user's model
    with quantized layers; known, verified: results of the runs and verifications for all plans; limit: the error that a
    plan may have on calibration and held-out inputs, since other inputs may have larger errors."""

    def __init__(self, planning: PlanningContext, margin: float = MARGIN) -> None:
        """margin: share of the budget that a plan may use on calibration and held-out inputs; 1 bounds no other errors."""
        self.planning = planning
        self.margin, self.limit = margin, margin * planning.max_error
        model, options = planning.subject.model, planning.options
        spans = spans_of(model, options.schemes, planning.subject.batches, options.seed)
        self.model = QuantizedModel(model, spans)

        captures = [path.capture for path in planning.capture.paths] or [planning.capture]
        self.layers = {name: layer for capture in captures for name, layer in layers_of(capture).items()}
        self.groups = groups_of(planning, self.layers)
        self.multiplied = set[str]().union(*map(multiplied_weights, captures))

        self.known = dict[Choice, ChoiceRun]()
        self.verified = dict[Choice, Verified]()

    def plans(self) -> tuple[QuantizedPlan, ...]:
        """A plan for each quantization scheme and, for several schemes, a plan that mixes them."""
        schemes, kept = self.planning.options.schemes, ("",) * len(self.groups)
        if not self.groups:
            return ()
        self.known[kept] = self.run({}, self.planning.subject.batches)._replace(error=0.0)
        self.known |= self.runs_of_layers()
        self.verified[kept] = Verified("emulation", 0.0, 0.0, 0.0)
        result = [self._plan(scheme, (scheme,)) for scheme in schemes]
        result += [self._plan(MIXED, schemes)] if len(schemes) > 1 else []
        return tuple(replace(plan, dominated_by=_better_than(plan, result)) for plan in result)

    def runs_of_layers(self) -> dict[Choice, ChoiceRun]:
        """The runs that measured single layers, as runs of choices: of groups with one layer, if one recording has all
        batches in their order."""
        measured = self.planning.measured
        if self.planning.capture.paths or measured.batches != len(self.planning.subject.batches):
            return {}
        result = dict[Choice, ChoiceRun]()
        for index, group in enumerate(self.groups):
            calls = [name for name, layer in self.layers.items() if layer.key in group.keys]
            owners = {self.planning.capture.nodes[name].owner for name in calls}
            if len(group.keys) > 1 or len(owners) > 1:
                continue
            for scheme in group.squares:
                runs = [measured.choice_runs[name, scheme] for name in calls if (name, scheme) in measured.choice_runs]
                if runs:
                    choice = [""] * len(self.groups)
                    choice[index] = scheme
                    result[tuple(choice)] = runs[0]
        return result

    def _plan(self, name: str, schemes: tuple[str, ...]) -> QuantizedPlan:
        """Search a plan that uses only `schemes`: the verified choice within all limits with the fewest bits."""
        search = Search(
            self.groups,
            schemes,
            lambda choice: self.run(self._schemes(choice), self.planning.subject.batches),
            self.known,
            self.verified,
            lambda choice: self._seconds(self._schemes(choice)),
            limit=self.limit,
        )
        choice = self._best_choice(search, schemes)
        layers = self._schemes(choice)
        verified = self.verified[choice]
        elements = sum(group.elements for group in self.groups)
        joint_groups = [group.keys for group in self.groups if len(group.keys) > 1]
        time_share = None
        whole_seconds = self._seconds({})
        if whole_seconds:
            time_share = self._seconds(layers) / whole_seconds
        return QuantizedPlan(
            name=name,
            schemes=schemes,
            layers=layers,
            groups=tuple(joint_groups),
            effective_bits=search.bits(choice) / elements,
            model_bits=self._model_bits(layers),
            left_out=tuple(sorted(self.multiplied - layers.keys())),
            predicted_error=search.predicted_error(choice),
            single_errors=search.sum_of_singles(choice),
            calibration_error=verified.measured,
            held_out_error=verified.held_out if self.planning.subject.held_out else None,
            verified_by=verified.by,
            despite=self._despite(layers, verified),
            score=verified.score,
            runs=search.spent,
            tested=search.tested,
            time_share=time_share,
            weights_bytes=self._bytes(layers),
            weights_share=self._bytes(layers) / self._bytes({}),
        )

    def _best_choice(self, search: Search, schemes: tuple[str, ...]) -> Choice:
        """Verify the choices that a search finds best, one by one; returns the smallest accepted one."""
        limit = self.limit
        last = len(self.verified) + VERIFICATIONS
        while len(self.verified) < last:
            choice = search.best(limit)
            if choice in self.verified:
                break
            self.verified[choice] = self._verify(choice)
            search.left = max(search.left, MORE_RUNS)
        choice = search.smallest_accepted(limit)
        if len(schemes) == 1:
            return choice
        more_accurate = search.more_accurate(choice)
        if more_accurate in self.verified:
            return choice
        self.verified[more_accurate] = self._verify(more_accurate)
        return search.smallest_accepted(limit)

    def _despite(self, schemes: Mapping[str, str], verified: Verified) -> dict[str, str]:
        """{layer in {layer: scheme} that is not known to be safe alone: why the plan may still quantize it}."""
        result = dict[str, str]()
        for layer in self.planning.judged.layers:
            verdict = layer.verdict
            if schemes.get(layer.key) == layer.scheme and verdict.verdict in ("unsafe", "untested"):
                plan = f"in the run with all layers of the plan quantized, the error is {verified.error:.2g}"
                result[layer.key] = f"{verdict.verdict} alone ({verdict.reason}); {plan}, within the limit"
        return result

    def _schemes(self, choice: Choice) -> dict[str, str]:
        return {key: scheme for group, scheme in zip(self.groups, choice, strict=True) for key in group.keys}

    def _verify(self, choice: Choice) -> Verified:
        """Run a choice on calibration and held-out inputs, in torchao if it has kernels, and bound unseen inputs' errors."""
        schemes, by, score = self._schemes(choice), "emulation", None
        ran = self._errors(schemes, by)
        if self.model.runs_in_torchao(schemes):
            in_torchao = self._errors(schemes, "torchao")
            if math.isfinite(in_torchao.worst):
                ran, by = in_torchao, "torchao"
        error = ran.worst
        scorer = self.planning.scorer
        if scorer is not None and error <= self.limit:
            score = scorer.score_of(self.model.model, partial(self.model.under, schemes), self.planning.options)
        if not math.isfinite(error) or (score is not None and not score.holds):
            error = REFUSED * self.limit
        return Verified(by, ran.measured, ran.held_out, error, score)

    def _errors(self, schemes: Mapping[str, str], by: str) -> _Errors:
        """Errors of {layer: scheme} on calibration and held-out inputs, and their bound for unseen inputs."""
        subject, distance = self.planning.subject, self.planning.output_metric.distance
        try:
            pairs = [list(self._outputs(schemes, batches, by)) for batches in (subject.batches, subject.held_out)]
            measured, held_out = (worst_of([distance(*pair) for pair in each]) for each in pairs)
            bound = worst_of([bound_of(each, distance) for each in pairs]) if self.margin < 1 else 0.0
        except Exception as error:
            let_through(error)
            return _Errors(math.inf, math.inf, math.inf)
        return _Errors(measured, held_out, worst_of([measured, held_out, self.margin * bound]))

    def run(self, schemes: Mapping[str, str], batches: Sequence[Batch], by: str = "emulation") -> ChoiceRun:
        """Run the model under {layer: scheme}; error inf if it raises. by: quantizes by `emulation` or `torchao`."""
        output_metric, errors, changes = self.planning.output_metric, list[float](), list[torch.Tensor]()
        try:
            for reference, outputs in self._outputs(schemes, batches, by):
                errors.append(output_metric.distance(reference, outputs))
                changes.append(change_of(reference, outputs, output_metric))
        except Exception as error:
            let_through(error)
            return ChoiceRun(math.inf, torch.zeros(0))
        return ChoiceRun(worst_of(errors), torch.cat(changes) if changes else torch.zeros(0))

    def _outputs(self, schemes: Mapping[str, str], batches: Sequence[Batch], by: str) -> Iterator[Pair]:
        """FP32's and the quantized model's outputs on each batch."""
        for batch in batches:
            yield self.planning.reference(batch), self.model.outputs(schemes, batch, self.planning.options.seed, by)

    def _bytes(self, schemes: Mapping[str, str]) -> float:
        """Bytes of all parameters and buffers under {layer: scheme}; other floating-point tensors take 16 bits."""
        return sum(tensor.numel() * bits / 8 for tensor, bits in self._tensors(schemes))

    def _model_bits(self, schemes: Mapping[str, str]) -> float:
        """Mean bits per number of all floating-point parameters and buffers under {layer: scheme}."""
        floating = [(tensor.numel(), bits) for tensor, bits in self._tensors(schemes) if tensor.is_floating_point()]
        return sum(count * bits for count, bits in floating) / sum(count for count, _ in floating)

    def _tensors(self, schemes: Mapping[str, str]) -> Iterator[tuple[torch.Tensor, float]]:
        """Every parameter and buffer once, with its bits per entry under {layer: scheme}."""
        named = {id(tensor): (key_of(name), tensor) for name, tensor in named_tensors(self.planning.subject.model)}
        for key, tensor in named.values():
            scheme = schemes.get(key, "")
            yield tensor, bits_of(scheme) if scheme or tensor.is_floating_point() else 8 * tensor.itemsize

    def _seconds(self, schemes: Mapping[str, str]) -> float:
        """Predicted seconds of one forward under {layer: scheme}."""
        device, result = self.planning.options.gpu_spec, 0.0
        for name, cost in self.planning.costs.items():
            if (layer := self.layers.get(name)) is not None and (scheme := schemes.get(layer.key)):
                result += quantized_seconds(cost, math.prod(shape(layer.weight)), SCHEMES[scheme], device)
            else:
                result += seconds(cost, half_of(device), device)
        return result


def _better_than(plan: QuantizedPlan, plans: Sequence[QuantizedPlan]) -> str:
    """The name of a plan with no more bits, memory and time, and the smallest error, or of an earlier plan with the same
    layers; "" if there is none. A plan that quantizes nothing has no better one."""
    if not any(plan.layers.values()):
        return ""
    earlier = plans[: plans.index(plan)]
    same = [one for one in earlier if one.layers == plan.layers]
    better = [one for one in plans if any(one.layers.values()) and one.error < plan.error and _is_as_cheap(one, plan)]
    return next((one.name for one in (*sorted(better, key=lambda one: one.error), *same)), "")


def _is_as_cheap(plan: QuantizedPlan, other: QuantizedPlan) -> bool:
    """Whether a plan has no more bits, memory and predicted time than another one."""
    bits, memory = plan.effective_bits <= other.effective_bits, plan.weights_bytes <= other.weights_bytes
    return bits and memory and (plan.time_share or 0.0) <= (other.time_share or 0.0)


def groups_of(planning: PlanningContext, layers: Mapping[str, Layer]) -> list[Group]:
    """The groups of layers that must have one scheme, with their possible schemes. layers: {operation: its Layer}.

    A group has all layers that read one weight; the linear layers of one module that read the same value, such as q, k
    and v, or gate and up; and all linear layers of the experts in one list. Every other layer is a group by itself.
    """
    names = dict[int, list[str]]()  # {id of a weight: all its names}
    tensors = dict[str, torch.Tensor]()
    for name, tensor in named_tensors(planning.subject.model):
        key = key_of(name)
        names.setdefault(id(tensor), []).append(key)
        tensors[key] = tensor
    result = []
    for members in nx.connected_components(_links_of(layers)):
        keys = tuple(dict.fromkeys(other for key in sorted(members) for other in names[id(tensors[key])]))
        inside = {name: layer for name, layer in layers.items() if layer.key in members}
        squares = {}  # {scheme: squared error of the outputs}
        shared = [scheme for scheme in planning.options.schemes if all(fits(x, scheme) for x in inside.values())]
        for scheme in shared:
            square = _squared_error(planning, inside, scheme)
            if math.isfinite(square):
                squares[scheme] = square
        if shared:
            entries = sum(tensors[key].numel() for key in members)
            result.append(Group(keys, entries, squares, _unknown_schemes(planning, inside, squares)))
    return result


def _unknown_schemes(planning: PlanningContext, operations: Iterable[str], schemes: Iterable[str]) -> frozenset[str]:
    """The schemes under which the effect of an operation is unknown without a run."""
    quantized = planning.measured.quantized
    names = tuple(operations)
    return frozenset(s for s in schemes if any(quantized[name, s].decided_by == "not-run" for name in names))


def _links_of(layers: Mapping[str, Layer]) -> nx.Graph:
    """A graph of all layers, with an edge between layers that must have one scheme."""
    links = nx.Graph()
    first = dict[tuple[str, str], str]()  # {(module, value that it reads, or "" for experts): its first layer}
    for layer in layers.values():
        key = layer.key
        parent = key.rpartition(".")[0]
        links.add_node(key)
        if layer.given is not None and layer.kind == "linear" and parent:
            source = layer.given
            while (viewed := view_source(source)) is not None:
                source = viewed
            links.add_edge(key, first.setdefault((parent, source.name), key))
        expert = _EXPERTS.match(key)
        if expert:
            links.add_edge(key, first.setdefault((expert[1], ""), key))
    return links


def _squared_error(planning: PlanningContext, operations: Iterable[str], scheme: str) -> float:
    """Sum of the squared effects of quantizing some operations, in the unit of the error budget."""
    effects = dict[tuple[str, str], float]()  # a layer counts once, also if several calls or paths run it
    for name in operations:
        measured = planning.measured.quantized[name, scheme]
        effect = measured.effect
        if measured.decided_by == "not-run":  # then the first-order estimate
            effect = math.hypot(measured.weight_effect, measured.activation_effect)
        layer = measured.key, measured.owner
        effects[layer] = max(effect, effects.get(layer, 0.0))
    return sum((effect * planning.output_metric.unit) ** 2 for effect in effects.values())
