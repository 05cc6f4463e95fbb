"""Measures every layer alone under every quantization scheme: effect, cause, cheapest remedy. Runs quantized models."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import fx, nn
from torch.utils._pytree import tree_map_only

from .. import offload
from ..artefact.configs import torchao_code
from ..criteria.margins import Form
from ..criteria.measure import Criteria, names_of
from ..emulation.intercept import Handler, intercept
from ..emulation.regions import Region
from ..errors import describe, let_through
from ..isolation.members import named_tensors
from ..isolation.process import quietly
from ..isolation.run_model import run_model
from ..numerics.entries import entries, finite, is_number
from ..numerics.metrics import output_error
from ..numerics.nodes import arguments, op_name, row_of
from ..numerics.schemes import SCHEMES, Rounding
from ..records import Batch, Contribution
from ..records.quantization import KEEP, SMOOTH, QuantizedLayer
from ..stages import beat, tick
from .attribute import FirstOrder, forms_of
from .decisions import find_deciding
from .measure import Measurement
from .probes import signs
from .quantized import (
    Changes,
    Roles,
    fits,
    key_of,
    picks_experts,
    quantize_part,
    roles_of,
    roles_of_experts,
    together,
)
from .rerun import LONGEST, SENSITIVE_SHARE, OutputMetric, Reruns
from .smoothing import best_smoothing

MAX_RUNS = 24
"""Maximum number of runs per scheme, in forward passes of the model."""

MAX_CHOICE_RUNS = 96
"""The same for a model that chooses inside, such as a router: first order does not see the choices that flip."""

_NEAREST = 1
"""The argument `interpolation_mode` of a grid sampler that picks the nearest entry."""

_ALIKE = 1.5
"""Weight and input count as equally harmful up to this ratio of their effects."""


def measure_layers(
    measurement: Measurement,
    first: FirstOrder,
    output_metric: OutputMetric,
    whole: ModelRun,
    runs: dict[tuple[str, str], ChoiceRun],
) -> Iterator[QuantizedLayer]:
    """Measure all layers under all schemes. runs: receives {(layer, scheme): its run}, if a run measured its effect.

    A run measures an effect without a first-order estimate, an effect on a choice inside the model, and an estimate
    above a quarter of the error budget. In this order; first the layers nearest to a choice, and the largest estimates.
    """
    layers = measurement.quantized.layers
    limit = output_metric.limit
    steps_to_choice = _steps_to_choice(measurement)
    steering = {name for name in layers if measurement.capture.nodes[name].steers}
    steps_to_choice |= dict.fromkeys(steering, 0)
    allowed = MAX_CHOICE_RUNS if steps_to_choice.keys() & layers.keys() else MAX_RUNS
    blind = {name for name in layers if not first.answers or name in first.unseen}
    calls = _calls_of(measurement)
    for scheme in measurement.quantized.schemes:
        reruns = _LayerRuns(measurement, output_metric, whole, calls, steering)
        estimates = {name: _sum_of_calls(first, scheme, calls[name]) for name in layers}

        def urgency(name: str, estimates: Mapping[str, Contribution] = estimates) -> tuple[bool, float, float]:
            """Sort key: the layers that are measured first have the smallest."""
            return name not in blind, steps_to_choice.get(name, math.inf), -estimates[name].isolated

        for name in sorted(estimates, key=urgency):
            tick(name)
            with torch.no_grad():
                parts = measurement.quantized.run(name, scheme)
                effect = estimates[name]
                must_run = name in blind or name in steps_to_choice or not together(parts).isfinite().all()
                if must_run or not effect.isolated <= SENSITIVE_SHARE * limit:
                    if reruns.spent < allowed or reruns.is_known(name, scheme):
                        error = reruns.effect(name, scheme, parts)
                        if reruns.outputs is not None:
                            runs[name, scheme] = reruns.as_choice()
                        effect = replace(
                            effect,
                            isolated=error,
                            decided_by="re-run",
                            criterion=reruns.criterion,
                            failure=reruns.failure,
                        )
                    elif must_run:
                        effect = replace(effect, decided_by="not-run")
                remedy, remedied = _remedy(reruns, name, scheme, effect, limit, allowed)
                layer = _describe(measurement, name, scheme, parts, effect)
                layer = replace(layer, remedy=remedy, remedied=remedied)
                yield _smoothed(reruns, layer, limit, allowed)


@dataclass(frozen=True)
class ModelRun:
    """What a run of the user's model on one batch needs."""

    model: QuantizedModel
    batch: Batch
    seed: int


class _LayerRuns(Reruns):
    """Runs with one quantized layer: of the operations after it, or of the user's model where these do not show the effect.

    The model runs for a layer of several calls, since it is quantized in all of them; and for a layer in `steering`, since
    Python code may take another branch than the recorded one. Each layer's model runs once for a scheme. calls: see
    `_calls_of`.
    """

    def __init__(
        self,
        measurement: Measurement,
        output_metric: OutputMetric,
        whole: ModelRun,
        calls: Mapping[str, tuple[str, ...]],
        steering: Collection[str],
    ) -> None:
        super().__init__(measurement, measurement.formats[0], output_metric)
        self._whole, self._calls, self._steering = whole, calls, steering
        self._known = dict[tuple[tuple[str, ...], str], tuple[float, str, str]]()

    @property
    def spent(self) -> float:
        return super().spent + len(self._known)

    def runs_model(self, name: str) -> bool:
        """Whether a run of the whole model measures the effect of a layer."""
        return len(self._calls[name]) > 1 or name in self._steering

    def is_known(self, name: str, scheme: str) -> bool:
        """Whether the run that measures a layer's effect was made for another call of the layer."""
        return (self._calls[name], scheme) in self._known

    def effect(self, name: str, scheme: str, parts: Changes) -> float:
        """The change of the outputs by one layer under a scheme. parts: the changes of its result in this call."""
        if not self.runs_model(name):
            return self.error(name, self.measurement.values[name] + together(parts))
        at = self._calls[name], scheme
        self.outputs = None
        if at not in self._known:
            self._known[at] = self._run_model(self.measurement.quantized.layers[name].key, scheme)
        error, self.criterion, self.failure = self._known[at]
        return error

    def as_choice(self) -> ChoiceRun:
        """The last run as the run of a choice that quantizes one layer."""
        assert self.outputs is not None
        error = self.output_metric.distance(self._outputs, self.outputs)
        return ChoiceRun(error, change_of(self._outputs, self.outputs, self.output_metric))

    def _run_model(self, key: str, scheme: str) -> tuple[float, str, str]:
        """The error of the model with one layer under a scheme, its criterion, and the exception that it raised in words."""
        beat()
        run = self._whole
        try:
            outputs = run.model.outputs({key: scheme}, run.batch, run.seed)
            error, criterion = self.output_metric(self._outputs, outputs)
            self.outputs = outputs
            return error, criterion, ""
        except Exception as error:  # another branch may return other outputs, or raise
            let_through(error)
            return math.inf, "", describe(error, LONGEST)


def _calls_of(measurement: Measurement) -> dict[str, tuple[str, ...]]:
    """{operation of a layer: all operations in which the same module reads the layer's weight}."""
    together = dict[tuple[str, str], list[str]]()
    for name, layer in measurement.quantized.layers.items():
        owner = measurement.capture.nodes[name].owner
        together.setdefault((layer.key, owner), []).append(name)
    return {name: tuple(names) for names in together.values() for name in names}


def _sum_of_calls(first: FirstOrder, scheme: str, calls: Sequence[str]) -> Contribution:
    """The first-order estimate of a layer's effect: the sum over its calls, which it exceeds only if effects amplify each
    other."""
    estimates = [first.quantized[name][scheme] for name in calls]
    return replace(
        estimates[0],
        isolated=sum(one.isolated for one in estimates),
        own=sum(one.own for one in estimates),
        cast=sum(one.cast for one in estimates),
    )


def _steps_to_choice(measurement: Measurement) -> dict[str, int]:
    """{operation: number of operations to the nearest choice downstream}, for operations upstream of a choice.

    A choice is a discrete result, such as the indices of a top-k, a mask, a random draw or a jump, that outputs depend on.
    """
    nodes = [n for n in measurement.nodes.values() if n.op == "call_function"]
    jumps = list(filter(_jumps, nodes))
    result = dict[str, int]()
    level = [*find_deciding(measurement.capture).values(), *jumps]
    steps = 0
    while level:
        steps += 1
        sources = dict.fromkeys(source for n in level for source in n.all_input_nodes)
        level = [source for source in sources if source.name not in result]
        result.update(dict.fromkeys((source.name for source in level), steps))
    return result


def _jumps(n: fx.Node) -> bool:
    """Whether an operation's result jumps where its derivative does not show it: by its kind or by its arguments."""
    row = row_of(n)
    if row.jumps or row.draws_by:
        return True
    if not isinstance(n.target, torch._ops.OpOverload):
        return False
    given = arguments(n)
    rounds = given.get("rounding_mode") is not None
    picks_nearest = given.get("interpolation_mode") == _NEAREST
    return rounds or picks_nearest


def _remedy(
    reruns: _LayerRuns, name: str, scheme: str, effect: Contribution, limit: float, runs: int
) -> tuple[str, float]:
    """The first scheme with finer scales that gives a better verdict in a run, and its effect; otherwise KEEP and 0."""
    if effect.decided_by == "not-run" or effect.isolated <= SENSITIVE_SHARE * limit:
        return "", effect.isolated
    allowed = SENSITIVE_SHARE * limit if effect.isolated <= limit else limit
    measurement, finer = reruns.measurement, SCHEMES[scheme].finer
    while finer is not None and reruns.spent < runs:
        parts = measurement.quantized.run(name, finer)
        if (remedied := reruns.effect(name, finer, parts)) <= allowed:
            return finer, remedied
        finer = SCHEMES[finer].finer
    return KEEP, 0.0


def _smoothed(reruns: _LayerRuns, layer: QuantizedLayer, limit: float, runs: int) -> QuantizedLayer:
    """The layer with its effect if its input is smoothed, by factors that are folded into an earlier module; measured for
    layers that no finer scheme repairs and whose input has outlier channels. SMOOTH is the remedy if the verdict improves."""
    is_candidate = layer.remedy == KEEP and layer.part == "activation" and layer.cause == "outlier channel"
    if not is_candidate or reruns.spent >= runs or reruns.runs_model(layer.node):
        return layer
    measurement = reruns.measurement
    best = best_smoothing(measurement.quantized, measurement.capture, layer.node, layer.scheme)
    if best is None:
        return layer
    smoothing, change = best
    effect = reruns.error(layer.node, measurement.values[layer.node] + change)
    described = f"alpha {smoothing.alpha:g}, folded into `{smoothing.into}`"
    layer = replace(layer, smoothing=described, smoothed=effect)
    allowed = SENSITIVE_SHARE * limit if layer.effect <= limit else limit
    return replace(layer, remedy=SMOOTH, remedied=effect) if effect <= allowed else layer


def _describe(measurement: Measurement, name: str, scheme: str, parts: Changes, effect: Contribution) -> QuantizedLayer:
    """The record of a layer under a scheme. parts: the changes of its result by weight and input."""
    reference = measurement.values[name]
    node = measurement.capture.nodes[name]
    layer = measurement.quantized.layers[name]
    errors = [output_error([reference], [reference + error]) for _, error in parts]
    weights = [effect.own, effect.cast] if effect.own or effect.cast else errors
    part, cause, place = _find_cause(measurement, name, _decisive_parts(parts, weights))
    return QuantizedLayer(
        scheme=scheme,
        node=name,
        owner=node.owner,
        op=node.op,
        key=layer.key,
        effect=effect.isolated,
        weight_effect=effect.own,
        activation_effect=effect.cast,
        decided_by=effect.decided_by,
        error=output_error([reference], [reference + together(parts)]),
        weight_error=errors[0],
        activation_error=sum(errors[1:]),
        saturated=sum(int(part.made.beyond.sum()) for part, _ in parts),
        zeroed=sum(int(part.made.vanished.sum()) for part, _ in parts),
        part=part,
        cause=cause,
        place=place,
        has_kernel=fits(layer, scheme),
        zero_blocks=_zero_blocks(parts),
        criterion=effect.criterion,
    )


def _decisive_parts(parts: Changes, weights: Sequence[float]) -> Changes:
    """The part with the largest weight and those of about its weight, the largest first. A part that is not finite
    decides alone: a NaN of the weight also appears in the input's part."""
    for change in parts:
        if not change[1].isfinite().all():
            return [change]
    ranked = sorted(zip(weights, parts, strict=False), key=lambda pair: -pair[0])
    largest = ranked[0][0]
    return [part for weight, part in ranked if _ALIKE * weight >= largest]


def _find_cause(measurement: Measurement, name: str, decisive: Changes) -> tuple[str, str, str]:
    """(part, cause, place) of a layer's error: of the first part whose cause is more than rounding."""
    for part, error in decisive:
        cause, place = measurement.quantized.cause(name, part, error)
        if cause != "rounding":
            return part.name, cause, place
    part_name = "both" if len(decisive) > 1 else decisive[0][0].name
    return part_name, "rounding", ""


def _zero_blocks(parts: Changes) -> str:
    """The parts with a block of zeros whose scale is zero: weight | activation | both; "" if there is none."""
    names = [part.name for part, _ in parts if part.has_zero_block]
    return "both" if len(names) > 1 else "".join(names)


PASTED_DTYPE = torch.bfloat16
"""The dtype of layers that are not quantized, in torchao's code as it is emitted."""

STORED = 1 << 27
"""Elements of quantized weights that are kept for the next run; further weights are quantized again in each run."""

SKETCH = 4096
"""Number of entries to which `change_of` compresses a change of the outputs."""


class ChoiceRun(NamedTuple):
    """Result of running the model under a choice of schemes. error: largest output error of any batch. change: changes
    of the outputs, [criteria of all batches, entries], see `change_of`."""

    error: float
    change: torch.Tensor


def change_of(reference: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], by: OutputMetric) -> torch.Tensor:
    """A compressed change d of the outputs, [criteria, SKETCH]: the largest norm of a row is the error. The rows of
    several small changes can be added.

    The row of a criterion is A'd, see margins.py; another error measure has one row, a multiple of d. Long rows are
    summed up with random signs, which preserves norms and inner products in the mean. Squares have a relative standard
    deviation of sqrt(2 / SKETCH). Source: Charikar et al., Finding Frequent Items in Data Streams (2002).
    """
    moved = [finite(entries(y) - entries(x)) if is_number(x) else None for x, y in zip(reference, outputs, strict=True)]
    rows = list[torch.Tensor]()
    if isinstance(by.distance, Criteria):
        rows = _rows_of_criteria(by.distance, reference, moved)
    if not rows:
        rows = [torch.cat([d.flatten() for d in moved if d is not None])]
    folded = torch.stack([_fold(row) for row in rows])  # [criteria, SKETCH]
    error = by(reference, outputs)[0] * by.unit
    largest = float(folded.norm(dim=1).max())
    factor = 0.0
    if largest and error < math.inf:
        factor = error / largest
    return folded * factor


def _rows_of_criteria(
    criteria: Criteria, reference: Sequence[torch.Tensor], moved: Sequence[torch.Tensor | None]
) -> list[torch.Tensor]:
    """A'd of each criterion, see margins.py, in one dimension; [] if any criterion has no Form."""
    names = names_of(reference, criteria.names)
    result = []
    for criterion in criteria.all(names):
        places = criteria.output_indices(criterion, names)
        forms = forms_of(criterion, criteria, [reference[i] for i in places])
        if forms is None:
            return []
        changes = [d for d in (moved[i] for i in places) if d is not None]
        result.append(torch.cat([_transpose(form, d).flatten() for form, d in zip(forms, changes, strict=False)]))
    return result


def _transpose(form: Form, d: torch.Tensor) -> torch.Tensor:
    """Compute A'd from the function that multiplies by A."""
    at = torch.zeros_like(d, requires_grad=True)
    with torch.enable_grad():
        (result,) = torch.autograd.grad((form(at) * d).sum(), at)
    return result


def _fold(row: torch.Tensor) -> torch.Tensor:
    """Sums of every SKETCH-th entry, with random signs that depend on the number of entries only."""
    if len(row) > SKETCH:
        row = row * signs(row.new_zeros(len(row)), torch.Generator().manual_seed(0))
    return nn.functional.pad(row.float(), (0, -len(row) % SKETCH)).view(-1, SKETCH).sum(0).cpu()


class QuantizedModel:
    """The user's model with quantized layers. spans: the result of `spans_of`."""

    def __init__(self, model: nn.Module, spans: Mapping[str, tuple[float, float]] | None = None) -> None:
        self.model, self.spans = model, spans or {}
        self.keys: dict[int, str] = {}
        self.stacks = set[str]()
        for name, tensor in named_tensors(model):
            self.keys.setdefault(_storage(tensor), key_of(name))
            if tensor.dim() == 3:
                self.stacks.add(key_of(name))
        self._weights: dict[tuple[Any, ...] | None, torch.Tensor] = {}
        self._room = 0 if offload.now() is not None else STORED

    @contextmanager
    def under(self, schemes: Mapping[str, str], rounding: Rounding | None = None) -> Iterator[None]:
        """In the body, layers compute under their schemes. schemes: {layer: scheme, or "" to not quantize it}. rounding:
        a library's own quantizer in place of a scheme's."""
        with intercept(_Layers(self, partial(self._quantize, schemes, rounding))):
            yield

    def outputs(
        self,
        schemes: Mapping[str, str],
        batch: Batch,
        seed: int,
        by: str = "emulation",
        rounding: Rounding | None = None,
    ) -> list[torch.Tensor]:
        """The model's outputs under {layer: scheme}. by: `emulation`; `torchao`, see `runs_in_torchao`; `pasted`: torchao
        with the dtype that its emitted code has for all other layers; `emulation of pasted`: the same dtype in the
        emulation. rounding: of the emulation, see `under`."""
        around = {
            "emulation": partial(self.under, schemes, rounding),
            "torchao": partial(self._in_torchao, schemes, None),
            "pasted": partial(self._in_torchao, schemes, PASTED_DTYPE),
            "emulation of pasted": partial(self._emulating_pasted, schemes),
        }[by]
        outputs = run_model(self.model, batch, seed=seed, around=around)
        return [x.float() if x.dtype == PASTED_DTYPE else x for x in outputs] if "pasted" in by else outputs

    def runs_in_torchao(self, schemes: Mapping[str, str]) -> bool:
        """Whether torchao has CPU kernels for all layers in {layer: scheme}."""
        used = {key: scheme for key, scheme in schemes.items() if scheme}
        if not used or find_spec("torchao") is None:
            return False
        modules = dict(self.model.named_modules())
        has_kernels = all(SCHEMES[scheme].on_cpu for scheme in used.values())
        are_layers = all(type(modules.get(key)) in (nn.Linear, nn.Embedding) for key in used)
        return has_kernels and are_layers

    @contextmanager
    def _in_torchao(self, schemes: Mapping[str, str], dtype: torch.dtype | None) -> Iterator[None]:
        """In the body, the layers are quantized by generated torchao code; `run_model` restores the model. dtype: of all other
        layers; None leaves it."""
        names = dict[str, Any]()
        with quietly():  # torchao logs which libraries for GPUs it does not find
            exec(torchao_code({key: scheme for key, scheme in schemes.items() if scheme}, []), names)
        before = dict(self.model._forward_pre_hooks)
        names["quantize"](self.model, dtype=dtype)
        try:
            yield
        finally:
            for number in self.model._forward_pre_hooks.keys() - before.keys():
                del self.model._forward_pre_hooks[number]
                self.model._forward_pre_hooks_with_kwargs.pop(number, None)

    @contextmanager
    def _emulating_pasted(self, schemes: Mapping[str, str]) -> Iterator[None]:
        """In the body, the model and its inputs are in PASTED_DTYPE; layers multiply quantized values in FP32, and round
        their results. `answer` restores the model."""
        hook = self.model.register_forward_pre_hook(partial(_cast_inputs, PASTED_DTYPE), with_kwargs=True)
        self.model.to(PASTED_DTYPE)
        in_bf16 = QuantizedModel(self.model, self.spans)  # with the weights that are there now
        try:
            with in_bf16.under(schemes):
                yield
        finally:
            hook.remove()

    def _quantize(
        self, schemes: Mapping[str, str], rounding: Rounding | None, key: str, roles: Roles, args: list[Any]
    ) -> None:
        """Replace a layer's weight and input in its arguments by their values under its scheme."""
        scheme = schemes.get(key, "")
        if not scheme:
            return
        for position, by in roles.quantizers(scheme):
            x = args[position]
            is_weight = position == roles.weight
            if rounding is not None:
                by = rounding(by, is_weight)
            is_stored = is_weight and _storage(x) in self.keys  # else a copy of the experts that were picked
            at = None  # a key for the weight and its quantizer
            if is_stored:
                at = (by, _storage(x), x.storage_offset(), x.shape, x.stride())
            values = self._weights.get(at)
            if values is None:
                values = quantize_part(roles, args, position, by, self.spans.get(key)).values
                if is_stored and values.numel() <= self._room:
                    self._weights[at] = values
                    self._room -= values.numel()
            args[position] = values


def _cast_inputs(dtype: torch.dtype, module: nn.Module, *inputs: Any) -> Any:
    """The arguments and keywords of a module with floating-point tensors in a dtype."""
    return tree_map_only(torch.Tensor, lambda x: x.to(dtype) if x.is_floating_point() else x, inputs)


class _Layers(Handler):
    """Passes the arguments of every layer, as a list that may be changed, to a function."""

    def __init__(self, of: QuantizedModel, change: Callable[[str, Roles, list[Any]], None]) -> None:
        self.of, self.change = of, change
        self.picked = dict[int, str]()

    def run_op(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], region: Region) -> Any:
        """Run one operation, with its arguments changed if it is a layer."""
        name, changed = op_name(op), list(args)
        roles = roles_of_experts(name, args, self._is_stack) or roles_of(name, args, lambda x: x.shape)
        key = self._key(args[roles.weight]) if roles is not None else None
        if roles is None or key is None:
            result = op(*args, **kwargs)
            if picks_experts(name, args) and self._is_stack(args[0]):
                self._remember(result, args[0])
            return result
        self.change(key, roles, changed)
        dtype = args[roles.weight].dtype
        if dtype == torch.float32:
            return op(*changed, **kwargs)
        in_fp32 = (x.float() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in changed)
        return op(*in_fp32, **kwargs).to(dtype)

    def _key(self, x: torch.Tensor) -> str | None:
        """The layer whose weight a tensor is, or which it was picked from."""
        return self.of.keys.get(_storage(x)) or self.picked.get(_storage(x))

    def _is_stack(self, x: Any) -> bool:
        return isinstance(x, torch.Tensor) and x.dim() in (2, 3) and self._key(x) in self.of.stacks

    def _remember(self, result: torch.Tensor, stack: torch.Tensor) -> None:
        """Note, while it exists, that a tensor was picked from a stack."""
        place, key = _storage(result), self._key(stack)
        if place in self.of.keys or key is None:
            return
        self.picked[place] = key
        weakref.finalize(result, self.picked.pop, place, None)

    run_leaf_op = run_op


def spans_of(
    model: nn.Module, schemes: Sequence[str], batches: Sequence[Batch], seed: int
) -> dict[str, tuple[float, float]]:
    """{layer: (smallest, largest value) of its input over the batches}; empty if no scheme has calibrated scales."""
    spans = dict[str, tuple[float, float]]()
    if not any(SCHEMES[scheme].is_calibrated for scheme in schemes):
        return spans

    def see(mask: torch.Tensor | None, key: str, roles: Roles, args: list[Any]) -> None:
        """Widen the span of a layer by the values of its input, except those of padding."""
        if roles.given is None:
            return
        values = finite(_without_padding(args[roles.given], mask)).float()
        low, high = map(float, values.aminmax())
        least, most = spans.get(key, (low, high))
        spans[key] = (min(low, least), max(high, most))

    for batch in batches:
        look = partial(see, batch[1].get("attention_mask"))
        layers = _Layers(QuantizedModel(model), look)
        run_model(model, batch, seed=seed, around=partial(intercept, layers))
    return spans


def _without_padding(x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """The tokens of a layer's input [texts, tokens, *] or [texts * tokens, *] that the mask [texts, tokens] does not mark
    as padding; the input itself without such a mask, or if its shape differs."""
    if not isinstance(mask, torch.Tensor) or mask.dim() != 2 or not bool(mask.any()):
        return x
    if x.shape[:2] == mask.shape:
        return x[mask.to(x.device).bool()]
    if x.dim() == 2 and len(x) == mask.numel():
        return x[mask.flatten().to(x.device).bool()]
    return x


def _storage(x: torch.Tensor) -> int:
    """Address of a tensor's memory, which its views share; its id if it has no memory of its own."""
    try:
        return x.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return id(x)
