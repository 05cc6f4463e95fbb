"""Measures every layer under every scheme: effect on the outputs, cause of the error, and cheapest remedy."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from ..numerics.metrics import output_error
from ..numerics.schemes import SCHEMES
from ..records import Contribution
from ..records.quantization import KEEP, QuantizedLayer
from ..stages import tick
from .attribute import FirstOrder
from .measure import Measurement
from .quantized import Parts
from .rerun import SENSITIVE_SHARE, Reruns, Yardstick

RUNS = 24
"""Run limit per scheme, in forward passes of the model."""


def measure_layers(measurement: Measurement, first: FirstOrder, yardstick: Yardstick) -> Iterator[QuantizedLayer]:
    """Measure all layers under all schemes. A run decides the effect where first order cannot, and where it predicts
    more than a quarter of the error budget, largest first."""
    layers, limit = measurement.quantized.layers, yardstick.limit
    for scheme in measurement.quantized.schemes:
        reruns = Reruns(measurement, measurement.formats[0], yardstick)
        known = {name: first.quantized[name][scheme] for name in layers}
        blind = {name for name in layers if not first.answers or name in first.unseen}
        for name in sorted(known, key=lambda name: (name not in blind, -known[name].isolated)):
            tick(name)
            with torch.no_grad():
                parts = measurement.quantized.run(name, scheme)
                effect = known[name]
                broken = not parts.result.isfinite().all()
                if name in blind or broken or not effect.isolated <= SENSITIVE_SHARE * limit:
                    effect = _run(reruns, name, parts, effect, name in blind or broken)
                yield replace(
                    _describe(measurement, name, scheme, parts, effect), **_remedy(reruns, name, scheme, effect, limit)
                )


def _run(reruns: Reruns, name: str, parts: Parts, effect: Contribution, needed: bool) -> Contribution:
    """The effect in a run; beyond the run limit the prediction, or "not-run" if a run is needed."""
    if reruns.spent >= RUNS:
        return replace(effect, decided_by="not-run") if needed else effect
    return replace(effect, isolated=reruns.error(name, parts.result), decided_by="re-run", criterion=reruns.criterion)


def _remedy(reruns: Reruns, name: str, scheme: str, effect: Contribution, limit: float) -> dict[str, Any]:
    """The first scheme with finer scales that gives a better verdict in a run; otherwise the layer is kept."""
    if effect.decided_by == "not-run" or effect.isolated <= SENSITIVE_SHARE * limit:
        return {"remedied": effect.isolated}
    allowed = SENSITIVE_SHARE * limit if effect.isolated <= limit else limit
    finer = SCHEMES[scheme].finer
    while finer is not None and reruns.spent < RUNS:
        remedied = reruns.error(name, reruns.measurement.quantized.run(name, finer).result)
        if remedied <= allowed:
            return {"remedy": finer, "remedied": remedied}
        finer = SCHEMES[finer].finer
    return {"remedy": KEEP, "remedied": 0.0}


def _describe(measurement: Measurement, name: str, scheme: str, parts: Parts, effect: Contribution) -> QuantizedLayer:
    quantized, node = measurement.quantized, measurement.capture.nodes[name]
    reference = measurement.values[name]

    def relative(error: torch.Tensor | None) -> float:
        return 0.0 if error is None else output_error([reference], [reference + error])

    by_weight, by_input = relative(parts.weight_error), relative(parts.input_error)
    weighs = (effect.own, effect.cast) if effect.own or effect.cast else (by_weight, by_input)
    part = "activation" if math.isfinite(by_weight) and not weighs[1] <= weighs[0] else "weight"
    if math.isfinite(by_weight) and not math.isfinite(by_input):
        part = "activation"
    cause = quantized.cause(name, scheme, parts, part)
    made = [x for x in (parts.quantized_weight, parts.quantized_input) if x is not None]
    return QuantizedLayer(
        scheme=scheme,
        node=name,
        owner=node.owner,
        op=node.op,
        effect=effect.isolated,
        weight_effect=effect.own,
        activation_effect=effect.cast,
        decided_by=effect.decided_by,
        error=relative(parts.error),
        weight_error=by_weight,
        activation_error=by_input,
        saturated=sum(x.saturated for x in made),
        zeroed=sum(x.zeroed for x in made),
        part=part,
        cause=cause.kind,
        place=cause.place,
        criterion=effect.criterion,
    )
