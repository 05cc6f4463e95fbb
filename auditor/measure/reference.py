"""Runs the FP32 reference under autograd. Every value gets a gradient, even at operations that autograd cannot
differentiate in some or all arguments."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from typing import Any, Literal

import torch
from torch import fx
from torch.utils import _pytree as pytree

from ..errors import first_line, let_through
from ..execution.execute import RECORDED, SeparateResults, ValueOf, separate_tensors
from ..numerics.entries import entries, is_plain, over_tensors, tensors_in
from ..numerics.kernels import is_product
from ..numerics.nodes import arguments_of, is_torchs_own, operation_of, row_of, target_of, view_source, wait_for_result

_REFUSED = re.compile(r"not differentiable with respect to argument '(\w+)'")

_FLAGS = ("training", "use_input_stats")
"""Names of the argument by which batch and instance norms select batch statistics."""


def run_with_gradients(
    target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], careful: bool = False
) -> tuple[Any, list[torch.Tensor]]:
    """Return the operation's result, and the tensor arguments for which the result has no derivative.

    Such arguments are the class weights of a loss, or the operands of a floor division. careful: also test the backward
    passes of torch's own operations; by default only those of operations outside torch.
    """
    lost: list[torch.Tensor] = []
    row = operation_of(target)
    if row.recurrent:
        args = _in_training_mode(target, args)
    while True:
        try:
            result = wait_for_result(target, target(*args, **kwargs))
            break
        except Exception as error:
            let_through(error)
            refused = _refused_argument(error, target, args, kwargs)
            if refused is None:
                lost += _requiring_gradients((args, kwargs))
                args, kwargs = over_tensors(torch.Tensor.detach, (args, kwargs))
                with torch.no_grad():
                    return wait_for_result(target, target(*args, **kwargs)), lost
            lost.append(refused)
            args, kwargs = _with_detached(refused, (args, kwargs))

    # The forward passes with gradients; now whether the backward pass does.
    results = tensors_in(result)
    refuses = row.late or any(type(x.grad_fn).__name__ == "NotImplemented" for x in results)
    is_tracked = row.asks_shape or row.draws_by or any(x.requires_grad for x in results)
    must_try = careful or not is_torchs_own(target)
    if is_tracked and not refuses and (not must_try or _leads_back(result, args, kwargs)):
        return result, lost
    rest = _requiring_gradients((args, kwargs))
    return over_tensors(torch.Tensor.detach, result), lost + rest


def _in_training_mode(target: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of a recurrent layer, on a GPU in training mode: only this supports gradients there, and without
    dropout the result is equal."""
    if all(x.device.type == "cpu" for x in tensors_in(args)):
        return args
    given = arguments_of(target, args, {})
    if given["train"]:
        return args
    return tuple((given | {"train": True, "dropout": 0.0}).values())


def _refused_argument(
    error: Exception, target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> torch.Tensor | None:
    """The argument whose gradient an exception refuses by name; None for any other exception, as of a norm that raises
    with gradients enabled."""
    match = _REFUSED.search(first_line(error))
    if match is None:
        return None
    argument = arguments_of(target, args, kwargs).get(match[1])
    if isinstance(argument, torch.Tensor) and argument.requires_grad:
        return argument
    return None


def _requiring_gradients(tree: Any) -> list[torch.Tensor]:
    return [x for x in tensors_in(tree) if x.requires_grad]


def _with_detached(argument: torch.Tensor, arguments: Any) -> Any:
    """Arguments of a call with one of them detached."""

    def detach(x: Any) -> Any:
        return x.detach() if x is argument else x

    return pytree.tree_map(detach, arguments)


def _leads_back(result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the backward pass from the result to the arguments runs without raising."""
    ends = [x for x in tensors_in((args, kwargs)) if x.requires_grad]
    try:
        connected = [entries(x).sum() for x in tensors_in(result) if x.requires_grad and ends]
        if connected:
            torch.autograd.grad(torch.stack(connected).sum(), ends, retain_graph=True, allow_unused=True)
    except Exception as error:
        let_through(error)
        return False
    return True


def batch_norm(target: Callable[..., Any], x: torch.Tensor, *args: Any) -> Any:
    """Run a batch norm, or an instance norm with running statistics. If the norm uses running statistics, its result is
    differentiable in them too. The statistics are not updated.

    x: [N, C, *]. args: weight, bias, mean, variance (all [C]), and the operation's other arguments, including eps.
    """
    weight, bias, mean, variance, *rest = args
    if mean is None:
        return target(x, *args)
    native = target(x, weight, bias, mean.detach().clone(), variance.detach().clone(), *rest)
    given = arguments_of(target, (x, *args), {})
    if any(given.get(flag) for flag in _FLAGS):  # the norm uses the statistics of its input
        return native
    eps = given["eps"]
    if isinstance(native, torch.Tensor):
        return _ByStatistics.apply(native, x, weight, mean, variance, eps)  # type: ignore[no-untyped-call]
    return _ByStatistics.apply(native[0], x, weight, mean, variance, eps), *native[1:]  # type: ignore[no-untyped-call]


class _ByStatistics(torch.autograd.Function):
    """The identity on a result w (x - mean) / sqrt(variance + eps) + b, with gradients for mean and variance."""

    @staticmethod
    def forward(
        ctx: Any,
        result: torch.Tensor,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        mean: torch.Tensor,
        variance: torch.Tensor,
        eps: float,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight, mean, variance)
        ctx.eps = eps
        return result.data  # `.data`, since a view would live as long as autograd's graph

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, mean, variance = ctx.saved_tensors
        scale = torch.rsqrt(variance + ctx.eps) * (1.0 if weight is None else weight)
        sides = [dim for dim in range(x.dim()) if dim != 1]
        total = gradient.sum(sides)
        product = (gradient * x).sum(sides) - mean * total
        return gradient, None, None, -scale * total, -0.5 * scale * product / (variance + ctx.eps), None


def as_leaf(x: torch.Tensor) -> torch.Tensor:
    """Make the tensor a leaf that stores no gradient: accumulation would overwrite gradients that hooks received."""
    x.requires_grad_().register_post_accumulate_grad_hook(lambda leaf: setattr(leaf, "grad", None))  # type: ignore[no-untyped-call]
    return x


Back = Literal["trusted", "tried", "none"]


def _sources_of(tensors: Iterable[torch.Tensor], values: Mapping[fx.Node, Any]) -> set[fx.Node]:
    """The nodes whose values contain one of the tensors."""
    ids = {id(x) for x in tensors}
    return {source for source, value in values.items() if any(id(x) in ids for x in tensors_in(value))}


class Reference(SeparateResults):
    """Runs a graph whose inputs are leaves of an autograd graph.

    back: backward passes through an operation are "trusted", "tried" once after the operation, or skipped ("none").
    anchors: leaves for results that depend on no float input.
    lost: inputs that an operation reads without a derivative.
    readings: for each matrix product or norm and each value it reads, a copy that only this node reads; None if no
    other node reads the value.
    saved: addresses of the storages that autograd keeps for backward passes.
    """

    def __init__(self, back: Back = "trusted") -> None:
        self.back = back
        self.anchors: list[torch.Tensor] = []
        self.lost: set[fx.Node] = set()
        self.readings: dict[str, dict[str, torch.Tensor | None]] = {}
        self.saved: set[int] = set()

    def compute(self, n: fx.Node, value_of: ValueOf) -> Any:
        """Compute the node inside the autograd graph."""
        if n.op == "output":
            return RECORDED.compute(n, value_of)
        many = row_of(n).recurrent  # hooks on the tensors of every step would be slow
        with nullcontext() if many else torch.autograd.graph.saved_tensors_hooks(self._note_saved, lambda x: x):
            result = self._compute(n, value_of)
            return self._connect(separate_tensors(result, [value_of(source) for source in n.all_input_nodes]))

    def _note_saved(self, x: torch.Tensor) -> torch.Tensor:
        self.saved |= {x.untyped_storage().data_ptr()} if is_plain(x) else set()
        return x.detach()  # an output that its own backward node held would never be freed

    def _compute(self, n: fx.Node, value_of: ValueOf) -> Any:
        sources = n.all_input_nodes
        row = row_of(n)
        if self.back == "none":
            self.lost |= set(sources)
            with torch.no_grad():
                return RECORDED.compute(n, value_of)
        if row.packet == "detach":  # the value reaches the outputs, so its error must be attributed
            return torch.ops.aten.alias.default(value_of(sources[0]))
        args: Any
        args, kwargs = fx.node.map_arg((n.args, n.kwargs), value_of)
        if isinstance(n.target, torch._ops.OpOverload) and row.normalizes == "statistics":
            return batch_norm(target_of(n), *args)
        outlines = tensors_in(n.meta.get("val"))
        if not any(x.is_floating_point() or x.is_complex() for x in outlines):
            with torch.no_grad():  # a discrete result has no derivative, and autograd may raise
                return RECORDED.compute(n, value_of)
        values = {source: value_of(source) for source in sources}
        has_readings = is_product(target_of(n)) or row.normalizes
        if has_readings and all(map(is_plain, tensors_in(list(values.values())))):
            return self._read_apart(n, values)
        result, lost = run_with_gradients(target_of(n), args, kwargs, self.back == "tried")
        if lost:
            self.lost |= _sources_of(lost, values)
        if row.steps:
            self.lost |= set(values)
        return result

    def _read_apart(self, n: fx.Node, values: dict[fx.Node, Any]) -> Any:
        """Compute a node from separate copies of shared values, so that each use of a value has its own gradient."""
        roots = set()
        for root in values:
            while (earlier := view_source(root)) is not None:
                root = earlier
            roots.add(root)
        single = all(isinstance(x, torch.Tensor) and x.dtype is torch.float32 for x in values.values())
        if single and len(roots) == len(values):  # errors of two views of one tensor are correlated
            shared = {s: torch.ops.aten.alias.default(x) for s, x in values.items() if len(s.users) > 1}
            self.readings[n.name] = {source.name: shared.get(source) for source in values}
            values |= shared
        return RECORDED.compute(n, values.__getitem__)

    def _connect(self, reference: Any) -> Any:
        """Add results that depend on no float input (positions, masks) to the autograd graph as leaves."""

        def connect(x: torch.Tensor) -> torch.Tensor:
            if not x.is_floating_point() or x.requires_grad or not is_plain(x):
                return x
            self.anchors.append(as_leaf(x))
            return x.clone()

        return over_tensors(connect, reference)
