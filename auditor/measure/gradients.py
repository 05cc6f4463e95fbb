"""How far the error of each operation, made forwards or backwards, moves the gradients of the parameters."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from ..execution.lowstep import gradient_error, one_low
from ..execution.step import Step
from ..numerics.nodes import row_of
from ..records import Capture, Contribution
from .backward import Handed
from .probes import moved, probes
from .sums import Sums

PROBES = 8

RERUNS = 128
"""Most re-runs of a training step, forwards and backwards, in each format."""

ELEMENTS = 10_000_000
"""Elements of all results of a step up to which there are any; first order has an answer for larger ones."""


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
    step: Step,
    handed: Mapping[str, Mapping[str, Handed | None]],
    formats: Sequence[str],
    seed: int,
    passes: int = PROBES,
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
    values, gradients = _keys(step)
    tensors = [step.live[name][index] for name, index in values]
    tensors += [_gradient(step, key) for key in gradients]
    sums: dict[tuple[str, str], tuple[Sums, Sums, Sums]] = {}
    for probe in probes(list(step.by_parameter.values()), passes, seed):
        found = torch.autograd.grad(probe.total, tensors, retain_graph=True, allow_unused=True)
        by_value = dict(zip(values, found[: len(values)], strict=True))
        signs = dict(zip(step.by_parameter, probe.signs, strict=True))
        by_gradient = dict(zip(gradients, found[len(values) :], strict=True)) | _of_parameters(step, signs)
        for node, by_format in handed.items():
            for fmt in formats:
                one = by_format.get(fmt)
                if one is not None:
                    forward, backward = _products(node, one, by_value, by_gradient)
                    kept = sums.setdefault((node, fmt), (Sums(), Sums(), Sums()))
                    for part, inner in zip(kept, (forward, backward, forward + backward), strict=True):
                        part.add_whole(inner)
    result: dict[str, dict[str, Contribution]] = {}
    for (node, fmt), kept in sums.items():
        forward, backward, both = (moved(part, passes, norm) for part in kept)
        result.setdefault(node, {})[fmt] = Contribution(both, own=forward, cast=0.0, backward=backward)
    return result


Key = tuple[str, int]


def _keys(step: Step) -> tuple[list[Key], list[Key]]:
    """Values and kept gradients that the parameters' gradients may depend on."""
    values = [
        (name, index)
        for name, leaves in step.live.items()
        for index, leaf in enumerate(leaves)
        if leaf.requires_grad and leaf.grad_fn is not None
    ]
    gradients = [key for key in values if (g := _held(step, key)) is not None and g.requires_grad]
    return values, gradients


def _held(step: Step, key: Key) -> torch.Tensor | None:
    name, index = key
    return step.gradients.get(name, [None] * (index + 1))[index]


def _gradient(step: Step, key: Key) -> torch.Tensor:
    gradient = _held(step, key)
    assert gradient is not None
    return gradient


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
    if sensitivity is None or error is None or sensitivity.shape != error.shape:
        return 0.0
    a, b = sensitivity.detach().float().reshape(-1), error.to(sensitivity.device).float().reshape(-1)
    inner = float(torch.dot(a, b))
    if math.isfinite(inner):
        return inner
    product = a * b
    return float(product[torch.isfinite(product)].double().sum())
