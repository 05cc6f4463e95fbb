"""How far the error of each operation, made forwards or backwards, moves the gradients of the parameters."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from ..execution.step import Step, gradient_error, one_low
from ..measure.probes import inner_products, probes
from ..numerics.nodes import row_of
from ..records import Capture, Contribution

PROBES = 8

RERUNS = 128
"""Most re-runs of a training step, forwards and backwards, in each format."""

ELEMENTS = 10_000_000
"""Elements of all results of a step up to which there are any; first order has an answer for larger ones."""


Leaves = list[torch.Tensor | None]
Key = tuple[str, int]


@dataclass(frozen=True)
class Handed:
    """What an operation hands back to its inputs, and on to its readers.

    sources: (node, which of its tensors) of every tensor argument. gradients: low minus reference, one per source,
    unscaled, None where the operation gives none; results: low minus reference of every floating result. Both are kept
    as bfloat16, since they enter inner products only.
    """

    sources: tuple[tuple[str, int], ...]
    gradients: Leaves
    results: Leaves


def jumps(captured: Capture) -> bool:
    """Whether the derivative of some operation jumps, so that first order does not see all that an error does."""
    return any(row_of(n).kink for n in captured.graph_module.graph.nodes)


def rerun(step: Step, first: Mapping[str, Mapping[str, Contribution]]) -> dict[str, dict[str, Contribution]]:
    """The same with every operation really run low, one at a time; those first that first order puts first."""
    elements = sum(leaf.numel() for leaves in step.live.values() for leaf in leaves)

    def weight(name: str) -> float:
        return max(one.isolated for one in first[name].values())

    result = {name: dict(by_format) for name, by_format in first.items()}
    for name in sorted(first, key=weight, reverse=True)[: RERUNS if elements <= ELEMENTS else 0]:
        for fmt, one in first[name].items():
            low = one_low(step, name, fmt)
            if low.failure is None:
                found = gradient_error(step.by_parameter, low.gradients)
                result[name][fmt] = replace(one, isolated=found, decided_by="re-run")
    return result


def attribute_gradients(
    step: Step, handed: Mapping[str, Mapping[str, Handed | None]], seed: int, passes: int = PROBES
) -> dict[str, dict[str, Contribution]]:
    """{node: {format: what it moves}}; the step was run with `create_graph`.

    With g the gradients of the parameters and v a vector of random signs, s = <v, g> is a function of every value y and
    of every gradient h that the backward pass hands on. An error d of the one moves s by <ds/dy, d>, of the other by
    <ds/dh, d>. One more backward pass, through the first, gives all of ds/dy and ds/dh.
    Raises: RuntimeError where an operation has no second derivative.
    Source: Pearlmutter, Fast exact multiplication by the Hessian (1994).
    """
    norm = math.sqrt(sum(float(g.detach().double().square().sum()) for g in step.by_parameter.values()))
    if not norm:
        return {}
    values = {
        (name, index): leaf
        for name, leaves in step.live.items()
        for index, leaf in enumerate(leaves)
        if leaf.requires_grad and leaf.grad_fn is not None
    }
    arrived = {
        (name, index): g
        for name, found in step.gradients.items()
        for index, g in enumerate(found)
        if (name, index) in values and g is not None and g.requires_grad
    }
    squares: dict[tuple[str, str], list[float]] = {}
    for probe in probes(list(step.by_parameter.values()), passes, seed):
        found = torch.autograd.grad(
            probe.total, [*values.values(), *arrived.values()], retain_graph=True, allow_unused=True
        )
        by_value = dict(zip(values, found[: len(values)], strict=True))
        signs = dict(zip(step.by_parameter, probe.signs, strict=True))
        by_gradient = dict(zip(arrived, found[len(values) :], strict=True)) | _of_parameters(step, signs)
        for node, by_format in handed.items():
            for fmt, one in by_format.items():
                if one is not None:
                    forward, backward = _products(node, one, by_value, by_gradient)
                    kept = squares.get((node, fmt), [0.0] * 3)
                    inner = forward, backward, forward + backward
                    squares[node, fmt] = [total + x**2 for total, x in zip(kept, inner, strict=True)]
    result: dict[str, dict[str, Contribution]] = {}
    for (node, fmt), kept in squares.items():
        forward, backward, both = (math.sqrt(total / passes) / norm for total in kept)
        result.setdefault(node, {})[fmt] = Contribution(both, own=forward, cast=0.0, backward=backward)
    return result


def _of_parameters(step: Step, signs: Mapping[str, torch.Tensor]) -> dict[Key, torch.Tensor | None]:
    """What s gains by the gradient of a parameter is that parameter's own signs."""
    leaves = {id(leaf): signs[name] for name, leaf in step.parameters.items()}
    return {
        (name, 0): leaves[id(live[0])] for name, live in step.live.items() if len(live) == 1 and id(live[0]) in leaves
    }


def _products(
    node: str,
    one: Handed,
    by_value: Mapping[Key, torch.Tensor | None],
    by_gradient: Mapping[Key, torch.Tensor | None],
) -> tuple[float, float]:
    """How far the node's forward error, and its backward error, move the probed sum."""
    forward = sum(_inner(by_value.get((node, i)), gap) for i, gap in enumerate(one.results))
    pairs = zip(one.sources, one.gradients, strict=True)
    return forward, sum(_inner(by_gradient.get(key), gap) for key, gap in pairs)


def _inner(sensitivity: torch.Tensor | None, error: torch.Tensor | None) -> float:
    if sensitivity is None or error is None or sensitivity.shape != error.shape or not error.numel():
        return 0.0
    return float(inner_products(sensitivity, error.to(sensitivity.device), 1).sum())
