"""Tests the backward pass of each single operation, on rounded FP32 values and gradients, and its effect on the
parameter gradients."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from ...errors import first_line, let_through
from ...execution.execute import low_literals, with_literals
from ...isolation import isolate
from ...numerics.casting import round_tree
from ...numerics.entries import dense, finite, is_plain
from ...numerics.formats import FORMATS
from ...numerics.histogram import magnitudes_of, merge_magnitudes, significant
from ...numerics.kernels import CUDA_ARITHMETIC, UnsupportedInFormat, run_op
from ...numerics.metrics import output_error
from ...numerics.nodes import operation_of, target_of, tensors_in
from ...records import NodeError
from ...records.training import BackwardNode, GradientChange
from ...training.replay import LowStep, Step, broken_gradients, gradient_error, one_low
from ...training.step import LOSS
from .recommend import least_exponent

MAX_RERUNS, FEWEST = 64, 16
"""Maximum number of operations with a separate training step in each format, usually and for the largest models."""

ELEMENTS = 2_000_000_000
"""Number of result elements that the separate steps may compute in total; FEWEST steps always run."""

MOST_SCALED = 24
"""Largest exponent of the power of two that scales the loss of a step with one low-precision operation."""

LOWERED = 2
"""Exponent of the power of two that divides the loss scale after a backward pass that overflows."""

OTHER_GRADIENTS = (
    "the recorded operations do not have the model's gradients, for example because of an autograd.Function"
)

Leaves = list[torch.Tensor | None]
Key = tuple[str, int]
"""(name of a node, index of a tensor in its result)."""
Gradients = dict[Key, torch.Tensor | None]


@dataclass(frozen=True)
class BackwardTest:
    """The backward pass of a single operation in one format, on FP32 values and gradients rounded to that format.

    error: errors of the returned gradients. weight: expected change of the loss by the errors of the operation's
    results, if their signs are random. gaps: {tensor argument: low-precision minus FP32 gradient, unscaled}, as
    bfloat16. scale: the loss scale of the test, from 1 to 2 ** MOST_SCALED.
    """

    error: NodeError
    weight: float = 0.0
    gaps: Mapping[Key, torch.Tensor] = field(default_factory=dict)
    scale: float = 1.0

    @property
    def is_broken(self) -> bool:
        """Whether the backward pass turns finite gradients into Inf or NaN."""
        return bool(self.error.overflow or self.error.nan)


def backward_nodes(first: Step, formats: tuple[str, ...]) -> tuple[tuple[BackwardNode, ...], str | None]:
    """Test every operation's backward pass and its effect on the gradients; also return why effects are missing."""
    tested = backward_errors(first, formats)
    lost = {fmt: broken_gradients(first, fmt) for fmt in formats}
    rerun = _heaviest(first, tested)
    nodes = list[BackwardNode]()
    for name, result in tested.items():
        broken = [fmt for fmt, error in result.items() if error.is_broken]
        steps = dict[str, LowStep]()  # with only this operation in low precision
        for fmt, error in result.items():
            if error.is_broken or name in rerun:
                steps[fmt] = one_low(first, name, fmt, error.scale)
        reaches = dict[str, str]()
        for fmt in broken:
            # `lost`: the parameter broken in a step with everything low, if the operation's own step breaks none
            parameter = _broken_parameter(first, steps[fmt]) or lost[fmt].get(name)
            if parameter is not None:
                reaches[fmt] = parameter
        contributions = dict[str, GradientChange]()
        for fmt, low in steps.items():
            if low.failure is None and first.faithful:
                contributions[fmt] = _change(first, low, result[fmt].gaps)
        node = first.capture.nodes[name]
        nodes.append(
            BackwardNode(
                name,
                node.op,
                node.owner,
                node.source,
                errors={fmt: error.error for fmt, error in result.items()},
                contributions=contributions,
                reaches=reaches,
                reasons={},
                called_from=node.called_from,
            )
        )
    return tuple(nodes), None if first.faithful else OTHER_GRADIENTS


def _heaviest(first: Step, tested: Mapping[str, Mapping[str, BackwardTest]]) -> set[str]:
    """The operations with the largest weights, which get a separate step; the larger the model, the fewer."""
    elements = sum(leaf.numel() for leaves in first.live.values() for leaf in leaves)
    most = min(MAX_RERUNS, max(FEWEST, ELEMENTS // max(elements, 1)))
    weights = {name: max(error.weight for error in result.values()) for name, result in tested.items()}
    ranked = sorted(weights, key=lambda name: -weights[name])
    return set(ranked[:most])


def _change(step: Step, low: LowStep, gaps: Mapping[Key, torch.Tensor]) -> GradientChange:
    """Relative change of the parameter gradients with one operation in low precision, and with only its backward pass
    in low precision (from `gaps`, to first order)."""
    at = [step.live[name][index] for name, index in gaps]
    errors = [gap.to(x.dtype) for gap, x in zip(gaps.values(), at, strict=True)]
    moved = torch.autograd.grad(at, [*step.parameters.values()], errors, retain_graph=True, allow_unused=True)
    backward = _norm(moved)
    whole = _norm([*step.by_parameter.values()])
    by_backward = backward / whole if whole else 0.0
    return GradientChange(gradient_error(step.by_parameter, low.gradients), by_backward)


def _norm(gradients: Sequence[torch.Tensor | None]) -> float:
    """L2 norm of all gradients together; None counts as zero."""
    squares = [dense(gradient.detach()).double().square() for gradient in gradients if gradient is not None]
    return math.sqrt(sum(float(square.sum()) for square in squares))


def _broken_parameter(step: Step, low: LowStep) -> str | None:
    """The first parameter whose gradient is finite in FP32 but not in the low-precision step."""
    broken = (n for n, g in low.gradients.items() if g is not None and not bool(torch.isfinite(g).all()))
    return next((n for n in broken if bool(torch.isfinite(step.by_parameter[n]).all())), None)


def backward_errors(step: Step, formats: Sequence[str]) -> dict[str, dict[str, BackwardTest]]:
    """{node: {format: its backward test}} for every operation that receives a gradient.

    The loss is scaled by a power of two, so that the largest entry of the incoming gradient is near 1. In a format that
    needs loss scaling, a backward pass that overflows there is tested again at smaller scales, as GradScaler would try
    them, while the other gradients of the step do not underflow. Problems that a loss scale repairs thus do not count.
    """
    least = _least_exponent(step)
    result: dict[str, dict[str, BackwardTest]] = {}
    for node in step.capture.graph_module.graph.nodes:
        arriving = step.gradients.get(node.name)
        floating = any(x.is_floating_point() and x.requires_grad for x in step.live.get(node.name, []))
        if node.op == "call_function" and arriving is not None and floating:
            result[node.name] = {fmt: _test_one(step, node, arriving, fmt, least) for fmt in formats}
    return result


def _least_exponent(step: Step) -> int:
    """The exponent of the smallest loss scale at which the gradients of the step, except inside the loss function,
    do not underflow in FP16. Negligible gradients do not count."""
    nodes = step.capture.nodes
    inside = (found for name, found in step.gradients.items() if name not in nodes or nodes[name].owner != LOSS)
    pool = merge_magnitudes(significant(magnitudes_of(g)) for found in inside for g in found if g is not None)
    return least_exponent(pool, -MOST_SCALED)


def _test_one(step: Step, node: fx.Node, arriving: Leaves, fmt: str, least: int) -> BackwardTest:
    """Test an operation's backward pass at the largest loss scale at which it does not overflow.

    The first scale brings the largest entry of the incoming gradient near 1. Smaller scales follow, down to 2 ** least;
    if the pass overflows at all of them, the result is that of the first scale.
    """
    sizes = [float(finite(g).abs().max()) for g in arriving if g is not None and g.numel()]
    largest = max(sizes, default=0.0)
    near_one = -math.floor(math.log2(largest)) if largest > 0 else 0
    first = _test_at(step, node, arriving, fmt, near_one)
    if not first.is_broken or not FORMATS[fmt].loss_scaling:
        return first
    for exponent in range(near_one - LOWERED, least - 1, -LOWERED):
        again = _test_at(step, node, arriving, fmt, exponent)
        if not again.is_broken:
            return again
    return first


def _test_at(step: Step, node: fx.Node, arriving: Leaves, fmt: str, exponent: int) -> BackwardTest:
    """Test an operation's backward pass at a loss scale of 2 ** exponent."""
    scaled = _scale_by(arriving, exponent)
    reference = _vjp(step, node, scaled, None)
    if isinstance(reference, str):
        return BackwardTest(NodeError(unsupported=f"FP32 backward: {reference}"))
    low = _vjp(step, node, scaled, fmt)
    if isinstance(low, str):
        return BackwardTest(NodeError(unsupported=low))
    (results, exact), (low_results, rounded) = reference, low
    error = _error([*exact.values()], [*rounded.values()])
    off = [_gap(ours, theirs, 0) for ours, theirs in zip(results, low_results, strict=False)]
    gaps = {key: gap for key in exact if (gap := _gap(exact[key], rounded[key], -exponent)) is not None}
    return BackwardTest(error, _weight(off, arriving), gaps, 2.0 ** min(max(exponent, 0), MOST_SCALED))


def _weight(errors: Leaves, gradients: Leaves) -> float:
    """Root of the sum of squares of error times gradient, over all entries; inf if any product is not finite."""
    known = [(e, g) for e, g in zip(errors, gradients, strict=False) if e is not None and g is not None]
    result = _norm([e.double() * g.double() for e, g in known])
    return result if math.isfinite(result) else math.inf


def _error(exact: Leaves, rounded: Leaves) -> NodeError:
    """Relative L2 error of all gradients that are finite in FP32, and how many of their entries became Inf or NaN."""
    pairs = [
        (ours[torch.isfinite(ours)], theirs[torch.isfinite(ours)])
        for ours, theirs in zip(exact, rounded, strict=True)
        if ours is not None and theirs is not None and ours.shape == theirs.shape
    ]
    reference, low = [ours for ours, _ in pairs], [theirs for _, theirs in pairs]
    overflow, nan = (sum(int(lost(x).sum()) for x in low) for lost in (torch.isinf, torch.isnan))
    return NodeError(local_error=output_error(reference, low), overflow=overflow, nan=nan)


def _gap(ours: torch.Tensor | None, theirs: torch.Tensor | None, exponent: int) -> torch.Tensor | None:
    """(theirs - ours) * 2 ** exponent, as bfloat16; None if the tensors cannot be compared entry by entry."""
    if ours is None or theirs is None or ours.shape != theirs.shape or not is_plain(ours):
        return None
    (gap,) = _scale_by([theirs.float() - ours.float()], exponent)
    return None if gap is None else gap.bfloat16()


def _vjp(step: Step, node: fx.Node, gradients: Leaves, fmt: str | None) -> tuple[Leaves, Gradients] | str:
    """Results and gradients of an operation, in FP32 or in a format on rounded values; or why the operation fails."""
    leaves: dict[Key, torch.Tensor] = {}

    def as_leaves(source: fx.Node) -> Any:
        """The value of an input, with a leaf of this operation's own graph for each tensor; the same leaf each time."""
        flat, spec = pytree.tree_flatten(step.env[source.name])
        result = list[Any]()
        tensors = 0
        for item in flat:
            if not isinstance(item, torch.Tensor):
                result.append(item)
                continue
            key = (source.name, tensors)
            tensors += 1
            if key not in leaves:
                leaves[key] = _leaf_of(item, fmt)
            result.append(leaves[key])
        return pytree.tree_unflatten(result, spec)

    args, kwargs = fx.node.map_arg((node.args, node.kwargs), as_leaves)
    target = target_of(node)
    try:
        with isolate(seed=step.seed), torch.enable_grad():
            if fmt is None:
                results = tensors_in(target(*args, **kwargs))
            else:
                literals = low_literals(step.capture.nodes[node.name], fmt)
                args, kwargs = with_literals(args, kwargs, literals)
                results = tensors_in(run_op(target, args, kwargs))
            wanted = {key: x for key, x in leaves.items() if x.requires_grad}
            backward = _backward(results, gradients, [*wanted.values()])
            return [x.detach() for x in results], dict(zip(wanted, backward, strict=True))
    except UnsupportedInFormat as error:
        return str(error)
    except Exception as error:
        let_through(error)
        return f"{operation_of(target).name}: {first_line(error)[:160]}"


def _leaf_of(x: torch.Tensor, fmt: str | None) -> torch.Tensor:
    """A detached tensor, rounded to a format if one is given, that requires a gradient as `x` does."""
    value: torch.Tensor = x.detach()
    if fmt is not None:
        value = round_tree(value, FORMATS[fmt])
    if value.is_floating_point():
        value.requires_grad_(x.requires_grad)
    return value


def _backward(results: list[torch.Tensor], gradients: Leaves, leaves: list[torch.Tensor]) -> Leaves:
    """Gradients of `leaves`, in FP32, from the gradients of an operation's results; None where a leaf has none."""
    outputs, incoming = list[torch.Tensor](), list[torch.Tensor]()
    for output, gradient in zip(results, gradients, strict=False):
        if gradient is not None and output.requires_grad:
            outputs.append(output)
            incoming.append(gradient.to(output.dtype))
    if not outputs or not leaves:
        return [None] * len(leaves)
    with CUDA_ARITHMETIC:  # FP32 tensors are not affected
        found = torch.autograd.grad(outputs, leaves, incoming, allow_unused=True)
    return [None if gradient is None else dense(gradient).float() for gradient in found]


def _scale_by(gradients: Leaves, exponent: int) -> Leaves:
    """Multiply by a power of two, in two steps since the power may exceed float32's range."""
    half = 2.0 ** (exponent // 2), 2.0 ** (exponent - exponent // 2)
    return [None if g is None else g.float() * half[0] * half[1] for g in gradients]
