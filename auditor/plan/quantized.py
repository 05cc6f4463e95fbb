"""Plans of quantization schemes: for every layer a scheme or 16 bits, with the fewest bits that meet the error budget."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import networkx as nx
import torch

from ..errors import let_through
from ..isolation.members import named_tensors
from ..measure.layers import QuantizedModel, change_of, spans_of
from ..measure.quantized import Layer, fits, key_of, layers_of, shape_of
from ..numerics.nodes import view_source
from ..numerics.schemes import SCHEMES
from ..records import Batch, Score
from ..records.quantization import MIXED, QuantizedLayer, QuantizedPlan
from .choices import Choice, Group, Run, Search, bits_of
from .costs import half_of, quantized_seconds, seconds
from .scores import InFp32
from .workbench import Workbench, worst_of

MORE_RUNS = 8
"""Number of further runs after each verification."""

VERIFICATIONS = 20
"""Maximum number of choices that are verified for one plan; if all are refused, all layers keep 16 bits."""

CLOSER = 0.8
"""Ratio of the next target to a refused choice's error on the calibration inputs, until a choice is accepted."""

_EXPERTS = re.compile(r"(.*?[^.]*expert[^.]*)\.\d+\.")
"""Matches the list of experts in the module path of a layer that belongs to one expert."""


class _Verified(NamedTuple):
    """A verified choice of schemes. by: what ran the model; measured, held_out: errors on the calibration and on the
    held-out inputs. score: None if an error exceeds the limit, or if plans are not scored."""

    by: str
    measured: float
    held_out: float
    score: Score | None = None


@dataclass(frozen=True)
class QuantizedPlans:
    """Makes the plans of one audit. model: runs the user's model with quantized layers. known, verified: what was run and
    verified for any plan; refused: the verified choices that exceed a limit."""

    bench: Workbench
    model: QuantizedModel
    groups: Sequence[Group]
    score: InFp32 | None
    known: dict[Choice, Run] = field(default_factory=dict)
    verified: dict[Choice, _Verified] = field(default_factory=dict)
    refused: set[Choice] = field(default_factory=set)

    @classmethod
    def of(cls, bench: Workbench, score: InFp32 | None = None) -> QuantizedPlans:
        """Prepare plans for the audited model. score: the FP32 model's score, if plans are scored."""
        model, options = bench.subject.model, bench.options
        spans = spans_of(model, options.schemes, bench.subject.batches, options.seed)
        return cls(bench, QuantizedModel(model, spans), groups_of(bench), score)

    def plans(self) -> tuple[QuantizedPlan, ...]:
        """A plan for each quantization scheme and, for several schemes, a plan that mixes them."""
        schemes = self.bench.options.schemes if self.groups else ()
        result = [self._plan(scheme, (scheme,)) for scheme in schemes]
        return (*result, *([self._plan(MIXED, schemes)] if len(schemes) > 1 else []))

    def _plan(self, name: str, schemes: tuple[str, ...]) -> QuantizedPlan:
        """The accepted plan with the fewest bits."""
        subject, limit, groups, verified = self.bench.subject, self.bench.max_error, self.groups, self.verified
        kept = ("",) * len(groups)
        self.known.setdefault(kept, self.run({}, subject.batches))
        verified.setdefault(kept, _Verified("emulation", 0.0, 0.0))
        search = Search(
            groups, schemes, lambda choice: self.run(self._schemes(choice), subject.batches), self.known, self.refused
        )
        accepted = min(filter(search.allows, verified.keys() - self.refused), key=search.bits)
        last, target = len(verified) + VERIFICATIONS, limit
        while len(verified) < last:
            choice = search.best(target)
            if choice in verified or (accepted != kept and target < limit):
                choice = search.safest(limit, accepted)
            if choice in verified:  # no choice with fewer bits is known: run others, near the limit
                search.best(limit)
                choice = search.safest(limit, accepted)
            if choice in verified:
                break
            verified[choice] = one = self._verify(self._schemes(choice))
            worst = worst_of([one.measured, one.held_out])
            if worst <= limit and (one.score is None or one.score.holds):
                accepted = choice
            else:
                self.refused.add(choice)
                target = min(target, CLOSER * self.known[choice].error)
            search.left = MORE_RUNS
        choice, layers, one = accepted, self._schemes(accepted), verified[accepted]
        return QuantizedPlan(
            name=name,
            schemes=schemes,
            layers=layers,
            groups=tuple(group.keys for group in groups if len(group.keys) > 1),
            effective_bits=search.bits(choice) / sum(group.elements for group in groups),
            predicted_error=search.predicted(choice),
            single_errors=search.summed(choice),
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
            errors = [self.run(schemes, batches, by).error for batches in (subject.batches, subject.held_out)]
            if math.isfinite(sum(errors)):
                break
        if self.score is not None and max(errors) <= self.bench.max_error:
            score = self.score.score_of(self.model.model, partial(self.model.under, schemes), self.bench.options)
        return _Verified(by, errors[0], errors[1], score)

    def run(self, schemes: Mapping[str, str], batches: Sequence[Batch], by: str = "emulation") -> Run:
        """Run the model under {layer: scheme}; the error is inf if the model raises. by: what runs the model."""
        bench, errors, changes = self.bench, list[float](), list[torch.Tensor]()
        try:
            for batch in batches:
                reference = bench.reference(batch)
                outputs = (
                    self.model.outputs(schemes, batch, bench.options.seed, by) if any(schemes.values()) else reference
                )
                errors.append(bench.yardstick.distance(reference, outputs) if outputs is not reference else 0.0)
                changes.append(change_of(reference, outputs, bench.yardstick))
        except Exception as error:
            let_through(error)
            return Run(math.inf, torch.zeros(0))
        return Run(worst_of(errors), torch.cat(changes) if changes else torch.zeros(0))

    def _bytes(self, schemes: Mapping[str, str]) -> float:
        """Bytes of all parameters and buffers under {layer: scheme}, with 16 bits for floats that are not quantized."""
        result = 0.0
        named = {id(tensor): (key_of(name), tensor) for name, tensor in named_tensors(self.bench.subject.model)}
        for key, tensor in named.values():
            scheme, is_float = schemes.get(key, ""), tensor.is_floating_point()
            bits = bits_of(scheme) if scheme or is_float else 8 * tensor.itemsize
            result += tensor.numel() * bits / 8
        return result

    def _time(self, schemes: Mapping[str, str]) -> float | None:
        """Predicted time of a forward, divided by the time in 16 bits."""
        device, whole, left = self.bench.options.figures, 0.0, 0.0
        layers = dict(_layers(self.bench))
        for name, cost in self.bench.costs.items():
            own, layer = seconds(cost, half_of(device), device), layers.get(name)
            whole += own
            if layer is not None and (scheme := schemes.get(layer.key)):
                own = quantized_seconds(cost, shape_of(layer.weight).numel(), SCHEMES[scheme], device)
            left += own
        return left / whole if whole else None


def _layers(bench: Workbench) -> Iterator[tuple[str, Layer]]:
    """(operation, Layer) for all layers of each recorded path."""
    for capture in [path.capture for path in bench.capture.paths] or [bench.capture]:
        yield from layers_of(capture).items()


def groups_of(bench: Workbench) -> list[Group]:
    """The groups of layers that must have one scheme, with their options.

    A group has all layers that read one weight; the linear layers of one module that read the same value, such as q, k
    and v, or gate and up; and all linear layers of the experts in one list. Every other layer is a group by itself.
    """
    names: dict[int, list[str]] = {}
    tensors = dict[str, torch.Tensor]()
    for name, tensor in named_tensors(bench.subject.model):
        names.setdefault(id(tensor), []).append(key_of(name))
        tensors[key_of(name)] = tensor
    alike, readers = nx.Graph(), dict[tuple[str, str], str]()
    effects, allowed, twins = dict[tuple[str, str], dict[str, float]](), dict[str, set[str]](), bench.capture.twins
    for name, layer in _layers(bench):
        key, fitting = layer.key, {s for s in bench.options.schemes if fits(layer, s)}
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
            effect = _effect(bench.measured.quantized[name, scheme]) * bench.yardstick.unit
            several = effects.setdefault((key, scheme), {})  # by operation: the same operation of two paths counts once
            several[twins.get(name, name)] = max(effect, several.get(twins.get(name, name), 0.0))
    result = []
    for members in nx.connected_components(alike):
        keys, elements = sorted(members), sum(tensors[key].numel() for key in members)
        shared = set.intersection(*(allowed[key] for key in keys))
        each = {s: [x for key in keys for x in effects[key, s].values()] for s in bench.options.schemes if s in shared}
        squares = {s: math.hypot(*one) ** 2 for s, one in each.items() if math.isfinite(sum(one))}
        if shared:
            everyone = tuple(dict.fromkeys(other for key in keys for other in names[id(tensors[key])]))
            result.append(Group(everyone, elements, squares))
    return result


def _effect(layer: QuantizedLayer) -> float:
    """The effect of a layer; an unknown effect is estimated from first order."""
    return math.hypot(layer.weight_effect, layer.activation_effect) if layer.decided_by == "not-run" else layer.effect
