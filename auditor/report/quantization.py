"""Layers under quantization schemes: how many are safe, the worst with cause and remedy, and the table of all."""

from __future__ import annotations

from ..numerics.schemes import SCHEMES
from ..records.audit import Audit
from ..records.quantization import KEEP, QuantizedLayer
from .blocks import Block, Grid, Prose
from .words import count, op, ratio, scope

HEADS = ("Layer", "Verdict", "Effect", "Error", "Weight", "Input", "Saturated", "To zero", "Cause", "Remedy")
ABOUT = (
    "Each layer by itself with quantized weight and input, everything else in FP32. Effect: change of the outputs. "
    "Error: relative L2 error of the layer's result; then with only the weight quantized, and the further change by the "
    "input. Saturated, to zero: number of entries."
)


def quantization_lines(audit: Audit) -> list[str]:
    """Lines for a terminal: for each scheme, the number of safe layers, and the worst layer with cause and remedy."""
    lines = list[str]()
    for scheme, layers in _by_scheme(audit).items():
        safe, worst = sum(layer.verdict.verdict == "safe" for layer in layers), layers[0]
        lines.append(f"{SCHEMES[scheme].label}: {safe} of {count(len(layers), 'layer')} safe. {_worst(worst)}".strip())
    return lines


def _worst(layer: QuantizedLayer) -> str:
    """The layer's verdict, effect, cause and remedy; nothing for a safe layer."""
    if layer.verdict.verdict == "safe":
        return ""
    remedy = f"; {_remedy(layer)}" if layer.remedy else ""
    where = f"`{scope(layer.owner)}` ({op(layer.op)})"
    return f"Worst: {where} is {layer.verdict.verdict}, effect {ratio(layer.effect)}; {_cause(layer)}{remedy}."


def quantization_section(audit: Audit) -> list[Block]:
    """The report's section: a table of all layers for each scheme; nothing without schemes."""
    by_scheme = _by_scheme(audit)
    if not by_scheme:
        return []
    tables = [
        Grid(HEADS, tuple(map(_row, layers)), caption=f"{SCHEMES[scheme].label}, torchao: {SCHEMES[scheme].source}")
        for scheme, layers in by_scheme.items()
    ]
    return [Prose("", (ABOUT,), "about"), *tables]


def _by_scheme(audit: Audit) -> dict[str, list[QuantizedLayer]]:
    result: dict[str, list[QuantizedLayer]] = {}
    for layer in audit.quantization:
        result.setdefault(layer.scheme, []).append(layer)
    return result


def _row(layer: QuantizedLayer) -> tuple[str, ...]:
    errors = (layer.effect, layer.error, layer.weight_error, layer.activation_error)
    return (
        f"{scope(layer.owner)} ({op(layer.op)})",
        layer.verdict.verdict,
        *map(ratio, errors),
        f"{layer.saturated:,}",
        f"{layer.zeroed:,}",
        _cause(layer),
        _remedy(layer),
    )


def _cause(layer: QuantizedLayer) -> str:
    parts = {"activation": "the input", "both": "weight and input"}
    return f"{layer.cause} of {parts.get(layer.part, 'the weight')}{f': {layer.place}' if layer.place else ''}"


def _remedy(layer: QuantizedLayer) -> str:
    if not layer.remedy:
        return ""
    if layer.remedy == KEEP:
        return "do not quantize this layer"
    return f"quantize it as {SCHEMES[layer.remedy].label}, effect {ratio(layer.remedied)}"
