"""Measures every layer under every scheme: effect on the outputs, cause of the error, and cheapest remedy."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from ..numerics.metrics import output_error
from ..numerics.schemes import SCHEMES
from ..records import Contribution
from ..records.quantization import KEEP, QuantizedLayer
from ..stages import tick
from .attribute import FirstOrder
from .measure import Measurement
from .quantized import Part, together
from .rerun import SENSITIVE_SHARE, Reruns, Yardstick

RUNS = 24
"""Run limit per scheme, in forward passes of the model."""

_ALIKE = 1.5
"""Weight and input count as equally harmful up to this ratio of their effects."""


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
                parts, effect = measurement.quantized.run(name, scheme), known[name]
                needed = name in blind or not together(parts).isfinite().all()
                if needed or not effect.isolated <= SENSITIVE_SHARE * limit:
                    if reruns.spent < RUNS:
                        error = reruns.error(name, measurement.values[name] + together(parts))
                        effect = replace(effect, isolated=error, decided_by="re-run", criterion=reruns.criterion)
                    elif needed:
                        effect = replace(effect, decided_by="not-run")
                remedy, remedied = _remedy(reruns, name, scheme, effect, limit)
                layer = _describe(measurement, name, scheme, parts, effect)
                yield replace(layer, remedy=remedy, remedied=remedied)


def _remedy(reruns: Reruns, name: str, scheme: str, effect: Contribution, limit: float) -> tuple[str, float]:
    """The first scheme with finer scales that gives a better verdict in a run, and its effect; otherwise KEEP."""
    if effect.decided_by == "not-run" or effect.isolated <= SENSITIVE_SHARE * limit:
        return "", effect.isolated
    allowed = SENSITIVE_SHARE * limit if effect.isolated <= limit else limit
    measurement, finer = reruns.measurement, SCHEMES[scheme].finer
    while finer is not None and reruns.spent < RUNS:
        changed = measurement.values[name] + together(measurement.quantized.run(name, finer))
        if (remedied := reruns.error(name, changed)) <= allowed:
            return finer, remedied
        finer = SCHEMES[finer].finer
    return KEEP, 0.0


def _describe(
    measurement: Measurement, name: str, scheme: str, parts: Sequence[Part], effect: Contribution
) -> QuantizedLayer:
    reference, node = measurement.values[name], measurement.capture.nodes[name]
    errors = [output_error([reference], [reference + part.error]) for part in parts]
    weighs = [effect.own, effect.cast] if effect.own or effect.cast else errors
    ranked = sorted(zip(weighs, parts, strict=False), key=lambda pair: -pair[0])
    if broken := [part for part in parts if not part.error.isfinite().all()]:
        ranked = [(math.inf, broken[0])]  # NaN of a weight is in the input's part too
    told = [part for weight, part in ranked if _ALIKE * weight >= ranked[0][0]]
    causes = [(part.name, *measurement.quantized.cause(name, part)) for part in told]
    plain = ("both" if len(told) > 1 else told[0].name, "rounding", "")
    part, cause, place = next((one for one in causes if one[1] != "rounding"), plain)
    return QuantizedLayer(
        scheme=scheme,
        node=name,
        owner=node.owner,
        op=node.op,
        effect=effect.isolated,
        weight_effect=effect.own,
        activation_effect=effect.cast,
        decided_by=effect.decided_by,
        error=output_error([reference], [reference + together(parts)]),
        weight_error=errors[0],
        activation_error=sum(errors[1:]),
        saturated=sum(part.made.saturated for part in parts),
        zeroed=sum(part.made.zeroed for part in parts),
        part=part,
        cause=cause,
        place=place,
        criterion=effect.criterion,
    )
