"""Layers under quantization schemes: how many are safe, the worst with cause and remedy, and the table of all."""

from __future__ import annotations

from ..numerics.schemes import SCHEMES
from ..records.audit import Audit
from ..records.quantization import KEEP, QuantizedLayer
from .blocks import Block, Grid, Prose
from .words import count, op, ratio, scope, sentence

LAYERS_SHOWN = 2
"""Number of layers per scheme that the terminal names; the report has all."""
HEADS = ("Layer", "Verdict", "Effect", "Error", "Weight", "Input", "Saturated", "To zero", "Cause", "Remedy")
ABOUT = (
    "Each layer by itself with quantized weight and input, everything else in FP32. Effect: change of the outputs. "
    "Error: relative L2 error of the layer's result; then with only the weight quantized, and the further change by the "
    "input. Saturated, to zero: number of entries."
)


def quantization_lines(audit: Audit) -> list[Block]:
    """Lines for a terminal: for each scheme, the number of layers by verdict, and the worst layers."""
    lines = list[str]()
    for scheme, layers in _by_scheme(audit).items():
        safe = sum(layer.verdict.verdict == "safe" for layer in layers)
        lines.append(f"{SCHEMES[scheme].label}: {safe} of {count(len(layers), 'layer')} safe")
        worst = [layer for layer in layers if layer.verdict.verdict != "safe"][:LAYERS_SHOWN]
        lines += [f"- {layer_words(layer)}" for layer in worst]
    return [Prose("Quantized", tuple(lines))] if lines else []


def layer_words(layer: QuantizedLayer) -> str:
    """A layer with its verdict, cause and remedy, in a sentence or two."""
    what = f"`{scope(layer.owner)}` ({op(layer.op)}) is {layer.verdict.verdict}: {layer.verdict.reason}"
    return f"{what}. {sentence(_cause(layer).capitalize())} {sentence(_remedy(layer))}".strip()


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
