"""Matrix products and convolutions as tensor cores compute them: rounded inputs, a sum in float32, one rounding."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch

from ..formats.entries import is_plain
from ..formats.table import Format, is_low
from ..trees import tensors_in
from .casting import in_float32
from .nodes import mutates, operation_of, overload_of
from .pooling import quickest_pooling
from .remembered import is_remembering, remembered

_LARGE = 1 << 14
"""Entries from which oneDNN is worth its call."""

_USED = 64
"""Times that each entry is used which a product reads, from which products of an earlier run are looked up."""

_PLAIN = (torch.Tensor, torch.nn.Parameter)

_CONV2D: tuple[Any, ...] = (None, [1, 1], [0, 0], [1, 1], 1)
"""Bias, stride, padding, dilation and groups of a convolution, where they are not given."""


def product(target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], row: Format) -> Any:
    """A matrix product or convolution of tensors in a format on a CPU, as tensor cores compute it."""
    if not (is_shared() and _is_wide(target, args, kwargs)):
        return computed(target, args, kwargs, row)

    def taken(known: torch.Tensor) -> torch.Tensor:
        connected: torch.Tensor = Taken.apply(lambda: known, *args)  # type: ignore[no-untyped-call]
        return connected if is_differentiated(args) else known

    return remembered(lambda: computed(target, args, kwargs, row), taken, target, *args, kwargs, row.name)


def is_shared() -> bool:
    """Whether what another run computed stands for a result: nowhere a derivative is taken of it."""
    return is_remembering() and (_FORWARDS.only or not torch.is_grad_enabled()) and not is_forward_mode()


def computed(target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], row: Format) -> Any:
    """`product`, whatever another run computed."""
    if _adds_apart(target, args):
        result: torch.Tensor = computed(target, (*args[:2], None), kwargs, row) + args[2]
        return result
    if row.dtype is torch.bfloat16 and _has_product(target, args):
        return target(*args, **kwargs)
    return in_float32(_fastest(target, args, kwargs), args, kwargs, row)


def _is_wide(target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether every entry that it reads is used so often that to read it once more takes little time beside the product."""
    if target is torch.ops.aten.scaled_dot_product_attention.default:
        return _attends_widely(args, kwargs)
    joined = target is torch.ops.aten.addmm.default
    if not joined and target is not torch.ops.aten.linear.default and target is not torch.ops.aten.conv2d.default:
        return False
    x, weight = args[1:3] if joined else args[:2]
    if weight.dim() < 2 or x.numel() < _LARGE or not weight.numel():
        return False
    out = weight.shape[1 if joined else 0]
    return bool(min(out, weight.numel() // out) >= _USED)


def _attends_widely(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether many keys are attended to, by queries that are no fewer, and nothing is drawn."""
    query, key = args[:2]
    drops = args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0)
    few = query.dim() < 3 or query.numel() < _LARGE or min(query.shape[-2], key.shape[-2]) < _USED
    # Scores are added to by another kernel where the gradient of what is added is asked for.
    trained = len(args) > 3 and args[3] is not None and args[3].requires_grad
    return not (few or drops or trained or tensors_in(kwargs))


def _adds_apart(target: Callable[..., Any], args: tuple[Any, ...]) -> bool:
    """Whether a linear layer is a product, rounded, and then a sum: torch joins them where the rows lie one after the other."""
    given = operation_of(target).gemm == "linear" and len(args) == 3 and args[2] is not None
    return given and args[0].dim() > 2 and not args[0].is_contiguous()


class _Forwards(threading.local):
    only = False
    recorded = False


_FORWARDS = _Forwards()


@contextmanager
def forwards_only() -> Iterator[None]:
    """In the body, in this thread, no backward pass is taken, or one that finds what autograd was to save gone."""
    before, _FORWARDS.only = _FORWARDS.only, True
    try:
        yield
    finally:
        _FORWARDS.only = before


@contextmanager
def torchs_derivatives() -> Iterator[None]:
    """In the body, in this thread, a backward pass takes the operations that torch takes: whoever compares runs by these
    finds each."""
    before, _FORWARDS.recorded = _FORWARDS.recorded, True
    try:
        yield
    finally:
        _FORWARDS.recorded = before


def fastest(target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any]:
    """What computes the operation in the least time: a product by oneDNN where all that it reads is float32 on a CPU."""
    known = target is torch.ops.aten.linear.default or target is torch.ops.aten.addmm.default
    if not known and target is not torch.ops.aten.conv2d.default:
        return target if kwargs else quickest_pooling(target, args)
    single = all(x.dtype is torch.float32 for x in args if isinstance(x, torch.Tensor))
    return _fastest(target, args, kwargs) if single and (_FORWARDS.only or not is_differentiated(args)) else target


def _fastest(target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any]:
    """The same product by oneDNN, where torch would take a kernel that needs twice as long on some processors."""
    if (
        kwargs
        or is_forward_mode()
        or not _has_onednn()
        or not all(is_known(x) for x in args if isinstance(x, torch.Tensor))
    ):
        return target
    found = _by_onednn(target, args)
    if found is target or not is_differentiated(args):
        return found
    if _FORWARDS.recorded:
        return target
    return partial(_Quick.apply, found, target)


def is_forward_mode() -> bool:
    """Whether derivatives are taken along with the run: of what is no operation of torch's there are none."""
    return getattr(torch.autograd.forward_ad, "_current_level", -1) >= 0


def is_known(x: torch.Tensor) -> bool:
    """Whether oneDNN computes on a tensor, in float32 where it is low: on no nested or sparse one, and in no FP64."""
    fits = x.dtype is torch.float32 or is_low(x.dtype)
    return type(x) in _PLAIN and fits and x.device.type == "cpu" and is_plain(x) and _lies_apart(x)


def _lies_apart(x: torch.Tensor) -> bool:
    """Whether entries share memory only along whole dimensions: windows that overlap have no layout in oneDNN."""
    reach = 0
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if stride and size > 1:
            if stride <= reach:
                return False
            reach += stride * (size - 1)
    return True


class _Quick(torch.autograd.Function):
    """A product by oneDNN, whose own operations have no derivative, with that of the operation that it stands for."""

    @staticmethod
    def forward(ctx: Any, compute: Callable[..., torch.Tensor], target: Callable[..., Any], *args: Any) -> torch.Tensor:
        ctx.save_for_backward(*(x for x in args if isinstance(x, torch.Tensor)))
        ctx.target, ctx.others = target, [None if isinstance(x, torch.Tensor) else (x,) for x in args]
        return compute(*args)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        tensors = iter(ctx.saved_tensors)
        args = [next(tensors) if other is None else other[0] for other in ctx.others]
        found = _derivatives(ctx.target, args, gradient, ctx.needs_input_grad[2:])
        return None, None, *found, *[None] * (len(args) - len(found))


def _derivatives(
    target: Callable[..., Any], args: list[Any], gradient: torch.Tensor, wanted: Sequence[bool]
) -> Sequence[torch.Tensor | None]:
    """By the tensors of a linear layer, a product that is added to a bias, or a convolution; None where not wanted."""
    if target is torch.ops.aten.conv2d.default:
        x, weight, bias, stride, padding, dilation, groups = (*args, *_CONV2D[len(args) - 2 :])
        mask, sizes = [*wanted, False][:3], None if bias is None else [len(bias)]
        found = torch.ops.aten.convolution_backward.default(
            gradient, x, weight, sizes, stride, padding, dilation, False, [0, 0], groups, mask
        )
        return tuple(one if asked else None for one, asked in zip(found, mask, strict=True))[: len(args)]
    joined = target is torch.ops.aten.addmm.default
    x, weight = args[1:3] if joined else args[:2]
    rows, entered = gradient.reshape(-1, gradient.shape[-1]), x.reshape(-1, x.shape[-1])
    by_x, by_weight, by_bias = (wanted[1], wanted[2], wanted[0]) if joined else (*wanted, False)[:3]
    first = (rows @ (weight.mT if joined else weight)).view(x.shape) if by_x else None
    second = (entered.mT @ rows if joined else rows.mT @ entered) if by_weight else None
    third = rows.sum(0) if by_bias else None
    return (third, first, second) if joined else (first, second, third)[: len(args)]


class Taken(torch.autograd.Function):
    """A result that was known before, not a view of it: it may be written to. One tensor, or several.

    Whoever asks for its gradient asks for what was saved.
    """

    @staticmethod
    def forward(ctx: Any, known: Any, *args: Any) -> Any:
        result = known()
        ctx.save_for_backward(*tensors_in(result))
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        _ = ctx.saved_tensors
        raise RuntimeError("a saved tensor was not kept")


def _by_onednn(target: Callable[..., Any], args: tuple[Any, ...]) -> Callable[..., Any]:
    if target is torch.ops.aten.conv2d.default and is_slow(*args[:2]):
        return conv2d_by_onednn if _has_bias(args[2:3], args[1].shape[0]) else target
    if target is torch.ops.aten.linear.default and min(x.numel() for x in args[:2]) >= _LARGE:
        fits = args[0].dim() > 1 and args[1].dim() == 2 and _has_bias(args[2:], args[1].shape[0])
        return linear_by_onednn if fits else target
    if target is torch.ops.aten.addmm.default and min(x.numel() for x in args[1:3]) >= _LARGE:
        fits = _has_bias(args[:1], args[2].shape[1])
        return (lambda bias, x, weight: linear_by_onednn(x, weight.t(), bias)) if fits else target
    return target


def _has_bias(given: Sequence[torch.Tensor | None], out: int) -> bool:
    """Whether there is a bias with an entry for each column, one after the other, or none: oneDNN broadcasts no other, and
    reads what lies behind the first."""
    return all(bias is None or (bias.shape == (out,) and bias.is_contiguous()) for bias in given)


def is_differentiated(args: tuple[Any, ...]) -> bool:
    """Whether autograd records what is computed from these."""
    return torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in args)


def is_slow(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether a convolution is one with 1x1 filters on one thread, which torch does not leave to oneDNN."""
    one = x.device.type == "cpu" and x.dim() == 4 and x.numel() >= _LARGE and weight.shape[2:] == (1, 1)
    return one and torch.get_num_threads() == 1 and _has_onednn()


def conv2d_by_onednn(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: Sequence[int] = (1, 1),
    padding: Sequence[int] = (0, 0),
    dilation: Sequence[int] = (1, 1),
    groups: int = 1,
) -> torch.Tensor:
    """`aten.conv2d` of float32 tensors."""
    result: torch.Tensor = torch.ops.aten.mkldnn_convolution.default(x, weight, bias, padding, stride, dilation, groups)
    return result


def linear_by_onednn(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`aten.linear` of float32 tensors. Shapes: [*, in], [out, in], [out] -> [*, out]."""
    result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return result


def _has_onednn() -> bool:
    mkldnn = torch.backends.mkldnn
    if not (mkldnn.is_available() and mkldnn.enabled):  # type: ignore[no-untyped-call]
        return False
    return hasattr(torch.ops.mkldnn, "_linear_pointwise")


def _has_product(target: Callable[..., Any], args: tuple[Any, ...]) -> bool:
    """Whether this processor multiplies these bfloat16 tensors itself, accumulating in float32 and rounding once."""
    tensors = [x for x in args if isinstance(x, torch.Tensor)]
    factors = tensors[1:] if operation_of(target).flops == "added_product" else tensors[:2]
    large = all(x.dim() > 1 and x.numel() >= _LARGE for x in factors)
    return operation_of(target).bf16_on_cpu and large and _multiplies_bfloat16() and _has_onednn()


@cache
def _multiplies_bfloat16() -> bool:
    known = getattr(torch.cpu, "_is_avx512_bf16_supported", None)
    return bool(known is not None and known())


def is_tensor_core(target: Callable[..., Any]) -> bool:
    """Whether the operation is a matrix product or convolution that accumulates in float32 on tensor cores."""
    return operation_of(target).product and not mutates(overload_of(target))


def is_product(target: Callable[..., Any]) -> bool:
    """Whether the result is linear in each tensor argument, so that their errors reach it one beside the other."""
    return operation_of(target).linear and not mutates(overload_of(target))
