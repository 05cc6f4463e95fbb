"""Plans of quantization schemes as each library's code has them: its layers, its rounding, and its bytes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from ...artefact.libraries import LIBRARIES, Library, MeasuredLayers, exceeds_in_bf16, expressible, stored_bits
from ...artefact.vllm import VLLM
from ...errors import let_through
from ...isolation.members import named_tensors
from ...measure.layers import QuantizedModel
from ...measure.quantized import key_of
from ...numerics.schemes import SCHEMES, Rounding
from ...plan.context import PlanningContext, worst_of
from ...records.audit import Groups
from ...records.quantization import LibraryCode, QuantizedLayer, QuantizedPlan


@dataclass(frozen=True)
class Layers:
    """The measured layers of the model under audit, see MeasuredLayers."""

    quantization: tuple[QuantizedLayer, ...]
    shared_modules: Groups
    tied_parameters: Groups
    criteria: tuple[str, ...]
    max_error: float


def measure_code(
    plans: Sequence[QuantizedPlan], measured: MeasuredLayers, planning: PlanningContext, model: QuantizedModel
) -> tuple[QuantizedPlan, ...]:
    """The plans of quantization schemes, with the error and size of their code in each library."""
    runs = _Runs(planning, model)
    return tuple(_with_code(measured, plan, runs) for plan in plans)


def _with_code(measured: MeasuredLayers, plan: QuantizedPlan, runs: _Runs) -> QuantizedPlan:
    """The plan, with the errors and sizes of its code."""
    libraries = (*LIBRARIES.values(), VLLM)
    layers = {library.title: expressible(measured, library, plan)[0] for library in libraries}
    plan = replace(plan, pasted_error=runs.error_in_bf16(layers["torchao"]))
    codes = {
        library.title: _code(measured, library, plan, layers[library.title], runs)
        for library in libraries
        if layers[library.title]
    }
    return replace(plan, as_pasted=codes)


def _code(
    measured: MeasuredLayers, library: Library, plan: QuantizedPlan, layers: Mapping[str, str], runs: _Runs
) -> LibraryCode:
    in_bf16 = library.title == "torchao" and not exceeds_in_bf16(measured, plan)
    size = sum(_bits_of(library, layers, runs.model.model, 16 if in_bf16 else 32)) / 8
    rounding = library.rounding
    if rounding is not None and not any(_differs(rounding, scheme) for scheme in layers.values()):
        rounding = None
    quantized = {path: scheme for path, scheme in plan.layers.items() if scheme}
    if rounding is None and quantized == layers:
        return LibraryCode(plan.error, size, plan.verified_by)
    error, by = runs.error(layers, rounding)
    return LibraryCode(error, size, by)


def _differs(rounding: Rounding, scheme: str) -> bool:
    """Whether a library rounds a scheme otherwise than the audit."""
    row = SCHEMES[scheme]
    parts = [(row.weight, True)]
    if row.activation is not None:
        parts.append((row.activation, False))
    return any(rounding(*part) != part[0] for part in parts)


def _bits_of(library: Library, layers: Mapping[str, str], model: torch.nn.Module, other: int) -> Iterator[float]:
    """Bits of every parameter and buffer in a library's code, tied ones once if the library keeps them tied. other: of
    floating-point numbers that are not quantized."""
    seen = set[tuple[int, int]]()
    modules = dict(model.named_modules(remove_duplicate=False))
    for name, tensor in named_tensors(model):
        key = key_of(name)
        scheme = layers.get(key)
        reader = id(modules.get(key)) if scheme and library.unties else 0
        if (reader, id(tensor)) in seen:
            continue
        seen.add((reader, id(tensor)))
        if scheme:
            yield stored_bits(library, scheme, tensor.shape, other)
        else:
            yield tensor.numel() * (other if tensor.is_floating_point() else 8 * tensor.itemsize)


class _Runs:
    """Runs choices of schemes, each once."""

    def __init__(self, planning: PlanningContext, model: QuantizedModel) -> None:
        self.planning, self.model = planning, model
        self._known = dict[tuple[frozenset[tuple[str, str]], Rounding | None], tuple[float, str]]()

    def error(self, layers: Mapping[str, str], rounding: Rounding | None) -> tuple[float, str]:
        """The largest error on calibration and held-out inputs, and what ran: `torchao` or `emulation`."""
        key = frozenset(layers.items()), rounding
        if key not in self._known:
            by = "emulation"
            if rounding is None and self.model.runs_in_torchao(layers):
                by = "torchao"
            self._known[key] = self._run(layers, rounding, by), by
        return self._known[key]

    def error_in_bf16(self, layers: Mapping[str, str]) -> float | None:
        """The largest error of torchao's code with all other layers in BF16; None if it quantizes no layer, or if the
        model does not run in BF16, since its own code mixes FP32 values with BF16 weights."""
        if not layers:
            return None
        by = "pasted" if self.model.runs_in_torchao(layers) else "emulation of pasted"
        error = self._run(layers, None, by)
        return error if math.isfinite(error) else None

    def _run(self, layers: Mapping[str, str], rounding: Rounding | None, by: str) -> float:
        batches = (*self.planning.subject.batches, *self.planning.subject.held_out)
        seed, distance = self.planning.options.seed, self.planning.output_metric.distance
        try:
            errors = [
                distance(self.planning.reference(batch), self.model.outputs(layers, batch, seed, by, rounding))
                for batch in batches
            ]
        except Exception as error:  # the user's own code
            let_through(error)
            return math.inf
        return worst_of(errors)
