"""The backward pass of every operation: alone, on FP32 values and gradients rounded to a format, and what it moves in a step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from ..errors import first_line, let_through
from ..execution.execute import low_literals, with_literals
from ..execution.step import Step, bind_step, gradient_error, one_low, run_step, spoilt
from ..isolation import isolated
from ..measure.probes import inner_products, probes
from ..numerics.casting import round_tree
from ..numerics.entries import dense, finite
from ..numerics.formats import FORMATS
from ..numerics.kernels import UnsupportedInFormat, run_op
from ..numerics.metrics import output_error
from ..numerics.nodes import operation_of, row_of, target_of, tensors_of
from ..records import Capture, Contribution, NodeError
from ..records.training import BackwardNode

PROBES = 8

RERUNS = 128
"""Most re-runs of a training step, forwards and backwards, in each format."""

ELEMENTS = 10_000_000
"""Elements of all results of a step up to which there are any; first order has an answer for larger ones."""


MOST_SCALED = 24
"""Powers of two that a step with one operation low is scaled by at most."""

Leaves = list[torch.Tensor | None]
Key = tuple[str, int]


@dataclass(frozen=True)
class PassedOn:
    """What an operation hands back to its inputs, and on to its readers.

    sources: (node, which of its tensors) of every tensor argument. gradients: low minus reference, one per source,
    unscaled, None where the operation gives none; results: low minus reference of every floating result. Both are kept
    as bfloat16, since they enter inner products only.
    """

    sources: tuple[tuple[str, int], ...]
    gradients: Leaves
    results: Leaves


@dataclass(frozen=True)
class BackwardTest:
    """The backward pass of one operation alone in one format, on the FP32 values and gradients rounded to it.

    error: of what it hands to its inputs. reaches: the parameter whose gradient turns non-finite with it, None if none
    does. handed: None where it cannot run.
    """

    error: NodeError
    handed: PassedOn | None = None
    reaches: str | None = None


def backward_nodes(first: Step, formats: tuple[str, ...]) -> tuple[tuple[BackwardNode, ...], str | None]:
    """Every operation's backward pass, with what it moves; and why what it moves is missing."""
    tested = backward_errors(first, formats)
    lost = {fmt: spoilt(first, fmt) for fmt in formats}
    handed = {name: {fmt: one.handed for fmt, one in result.items()} for name, result in tested.items()}
    moved, why = _attribute(first, handed)
    if moved and jumps(first.capture):
        moved = rerun(first, moved)
    nodes = []
    for name, result in tested.items():
        # Where the operation alone breaks gradients that reach no parameter, what a step loses that is all low.
        broken = {fmt: one.error.overflow or one.error.nan for fmt, one in result.items()}
        reaches = {f: one.reaches or (lost[f].get(name) if broken[f] else None) for f, one in result.items()}
        node = first.capture.nodes[name]
        nodes.append(
            BackwardNode(
                name,
                node.op,
                node.owner,
                node.source,
                errors={fmt: one.error for fmt, one in result.items()},
                contributions=moved.get(name, {}),
                reaches={fmt: parameter for fmt, parameter in reaches.items() if parameter is not None},
                reasons={},
                called_from=node.called_from,
            )
        )
    return tuple(nodes), why


def _attribute(
    first: Step, handed: Mapping[str, Mapping[str, PassedOn | None]]
) -> tuple[dict[str, dict[str, Contribution]], str | None]:
    if not first.faithful:
        return (
            {},
            "the recorded operations have other gradients than the model, as with an autograd.Function of its own",
        )
    try:
        step = run_step(bind_step(first.capture, first.subject, first.batch, first.seed), create_graph=True)
        return attribute_gradients(step, handed, first.seed), None
    except Exception as error:
        let_through(error)
        return {}, f"an operation has no second derivative ({first_line(error)[:120]})"


def backward_errors(step: Step, formats: Sequence[str]) -> dict[str, dict[str, BackwardTest]]:
    """{node: {format: what its backward pass does}} for every operation that has a gradient to pass on.

    The gradient that arrives is scaled by a power of two, so that its largest entry is near 1: what a loss scale can
    mend is not held against the operation.
    """
    result: dict[str, dict[str, BackwardTest]] = {}
    for node in step.capture.graph_module.graph.nodes:
        arriving = step.gradients.get(node.name)
        floating = any(x.is_floating_point() and x.requires_grad for x in step.live.get(node.name, []))
        if node.op == "call_function" and arriving is not None and floating:
            result[node.name] = {fmt: _test_one(step, node, arriving, fmt) for fmt in formats}
    return result


def broken_parameter(step: Step, name: str, fmt: str, scale: float) -> str | None:
    """The first parameter whose gradient turns non-finite when this operation alone is low, at a loss scale."""
    low = one_low(step, name, fmt, scale).gradients
    broken = (n for n, g in low.items() if g is not None and not bool(torch.isfinite(g).all()))
    return next((n for n in broken if bool(torch.isfinite(step.by_parameter[n]).all())), None)


def _test_one(step: Step, node: fx.Node, arriving: Leaves, fmt: str) -> BackwardTest:
    exponent = _exponent(arriving)
    scaled = _scale_by(arriving, -exponent)
    reference = _vjp(step, node, scaled, None)
    if isinstance(reference, str):
        return BackwardTest(NodeError(unsupported=f"FP32 backward: {reference}"))
    low = _vjp(step, node, scaled, fmt)
    if isinstance(low, str):
        return BackwardTest(NodeError(unsupported=low))
    exact, rounded = reference.gradients, low.gradients
    error = _error(exact, rounded)
    broken = error.overflow or error.nan
    reaches = broken_parameter(step, node.name, fmt, 2.0 ** min(max(-exponent, 0), MOST_SCALED)) if broken else None
    gaps = _scale_by([_gap(a, b) for a, b in zip(exact, rounded, strict=True)], exponent)
    results = [_gap(a, b) for a, b in zip(reference.results, low.results, strict=False)]
    handed = PassedOn(reference.sources, [None if g is None else g.bfloat16() for g in gaps], results)
    return BackwardTest(error, handed, reaches)


def _error(exact: Leaves, rounded: Leaves) -> NodeError:
    """Relative L2 of all gradients together where they are finite in FP32, beside what is not finite there."""
    pairs = [
        (ours[torch.isfinite(ours)], theirs[torch.isfinite(ours)])
        for ours, theirs in zip(exact, rounded, strict=True)
        if ours is not None and theirs is not None and ours.shape == theirs.shape
    ]
    reference, low = [ours for ours, _ in pairs], [theirs for _, theirs in pairs]
    overflow, nan = (sum(int(lost(x).sum()) for x in low) for lost in (torch.isinf, torch.isnan))
    return NodeError(local_error=output_error(reference, low), overflow=overflow, nan=nan)


def _gap(ours: torch.Tensor | None, theirs: torch.Tensor | None) -> torch.Tensor | None:
    if ours is None or theirs is None or not ours.is_floating_point() or ours.shape != theirs.shape:
        return None
    return (theirs.float() - ours.float()).bfloat16()


def _vjp(step: Step, node: fx.Node, gradients: Leaves, fmt: str | None) -> PassedOn | str:
    """The operation and its gradients, in FP32, or in a format on rounded values and gradients; or why it cannot."""
    leaves: dict[tuple[str, int], torch.Tensor] = {}

    def leaf(source: fx.Node) -> Any:
        flat, spec = pytree.tree_flatten(step.env[source.name])
        made, tensors = [], 0
        for item in flat:
            if isinstance(item, torch.Tensor):
                key, tensors = (source.name, tensors), tensors + 1
                if key not in leaves:
                    value = item.detach() if fmt is None else round_tree(item.detach(), FORMATS[fmt])
                    leaves[key] = value.requires_grad_(item.requires_grad) if value.is_floating_point() else value
                item = leaves[key]
            made.append(item)
        return pytree.tree_unflatten(made, spec)

    args, kwargs = fx.node.map_arg((node.args, node.kwargs), leaf)
    try:
        with isolated(seed=step.seed), torch.enable_grad():
            if fmt is None:
                results = tensors_of(target_of(node)(*args, **kwargs))
            else:
                literals = low_literals(step.capture.nodes[node.name], fmt)
                results = tensors_of(run_op(target_of(node), *with_literals(args, kwargs, literals)))
            wanted = {key: x for key, x in leaves.items() if x.requires_grad}
            result = _backward(results, gradients, list(wanted.values()))
            return PassedOn(tuple(wanted), result, [x.detach() for x in results])
    except UnsupportedInFormat as error:
        return str(error)
    except Exception as error:
        let_through(error)
        return f"{operation_of(target_of(node)).name}: {first_line(error)[:160]}"


def _backward(results: list[torch.Tensor], gradients: Leaves, leaves: list[torch.Tensor]) -> Leaves:
    pairs = [(y, g.to(y.dtype)) for y, g in zip(results, gradients, strict=False) if g is not None and y.requires_grad]
    if not pairs or not leaves:
        return [None] * len(leaves)
    result = torch.autograd.grad([y for y, _ in pairs], leaves, [g for _, g in pairs], allow_unused=True)
    return [None if g is None else dense(g).float() for g in result]


def _scale_by(gradients: Leaves, exponent: int) -> Leaves:
    """Times a power of two, in two steps where one is beyond float32."""
    half = 2.0 ** (exponent // 2), 2.0 ** (exponent - exponent // 2)
    return [None if g is None else g.float() * half[0] * half[1] for g in gradients]


def _exponent(gradients: Leaves) -> int:
    """floor(log2) of the largest finite magnitude; 0 for zeros alone."""
    sizes = [float(finite(g).abs().max()) for g in gradients if g is not None and g.numel()]
    largest = max(sizes, default=0.0)
    return math.floor(math.log2(largest)) if largest > 0 else 0


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
    step: Step, handed: Mapping[str, Mapping[str, PassedOn | None]], seed: int, passes: int = PROBES
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
    one: PassedOn,
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
