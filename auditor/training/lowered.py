"""Which gradients are low under autocast, by module and by parameter."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ..execution.policy import Policy
from ..execution.resolve import resolve
from ..numerics.histogram import merged, significant
from ..records import Capture, Magnitudes
from ..records.training import ModuleGradients, ParameterGradients

Weights = Mapping[str, tuple[Magnitudes, dict[int, int]]]
"""{parameter: histogram of its values, and of its update ratios}."""


def low_names(captured: Capture, fmt: str, precision_of: Callable[[str], str]) -> frozenset[str]:
    """Values whose gradient is low under autocast: those that are low themselves, or are lowered for a reader."""
    found = resolve(Policy(captured, "autocast", precision_of, fmt))
    return frozenset(name for name in found.dtypes if found.low(name)) | frozenset(found.lowered)


def low_by_module(captured: Capture, gradients: Mapping[str, Magnitudes], low: frozenset[str]) -> dict[str, Magnitudes]:
    """The low gradients of every module, its parameters' among them."""
    groups: dict[str, list[Magnitudes]] = {}
    for name, found in gradients.items():
        if name in low:
            groups.setdefault(_module(captured, name), []).append(significant(found))
    return {module: merged(parts) for module, parts in groups.items()}


def _module(captured: Capture, name: str) -> str:
    """Module of a node, or of the parameter that a placeholder stands for."""
    if name in captured.nodes:
        return captured.nodes[name].owner
    fqn = next((p.fqn for p in captured.placeholders if p.name == name), None)
    return (fqn or "").rpartition(".")[0]


def module_gradients(
    captured: Capture, gradients: Mapping[str, Magnitudes], low: frozenset[str]
) -> tuple[ModuleGradients, ...]:
    """Gradients of what every module's operations return, in the order they run."""
    groups: dict[str, list[str]] = {}
    for name in captured.nodes:
        if name in gradients:
            groups.setdefault(captured.nodes[name].owner, []).append(name)
    return tuple(
        ModuleGradients(
            module,
            merged(gradients[name] for name in names),
            merged(significant(gradients[name]) for name in names if name in low) if low.intersection(names) else None,
        )
        for module, names in groups.items()
    )


def parameter_gradients(
    captured: Capture, gradients: Mapping[str, Magnitudes], weights: Weights, low: frozenset[str]
) -> tuple[ParameterGradients, ...]:
    """Every trainable parameter with its gradient, a tied one once."""
    found = {}
    for place in captured.placeholders:
        if place.fqn is not None and place.fqn in weights and place.name in gradients and place.fqn not in found:
            weight, ratios = weights[place.fqn]
            module = place.fqn.rpartition(".")[0]
            gradient = gradients[place.name]
            found[place.fqn] = ParameterGradients(place.fqn, module, weight, gradient, ratios, place.name in low)
    return tuple(found.values())
