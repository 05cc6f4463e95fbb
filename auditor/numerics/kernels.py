"""Runs one operation in the dtypes of its arguments, with the arithmetic of a GPU."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ..errors import MeasureError, first_line, let_through
from .casting import carried_in, format_in, in_float32, in_format, scalars_lowered, widen
from .cells import is_fused_cell, run_cell, run_layer
from .entries import over_tensors, tensors_in
from .formats import FORMATS, Format, dtype_name, format_of, is_low
from .nodes import arguments_of, mutates, operation_of, overload_of, wait_for_result
from .operations import Operation
from .scans import fourier_transform, is_scan, run_scan

_NO_KERNEL = re.compile(
    r"not implemented for|not supported for|Unsupported dtype|low precision dtypes|Expected.*(Half|BFloat16)", re.I
)
_TOO_WIDE = "without overflow"


class UnsupportedInFormat(MeasureError, RuntimeError):
    """The operation does not support the format; the message is the reason. This class is also a RuntimeError, like
    CUDA's error. owner: path of the module that contains the operation, if known. literal: whether a number in the
    user's code does not fit the format.
    """

    def __init__(self, reason: str, owner: str | None = None, *, literal: bool = False) -> None:
        super().__init__(reason, slug="unsupported-op")
        self.owner, self.literal = owner, literal


def run_op(target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute `target(*args, **kwargs)` as a GPU does; the result has the dtype that torch gives it.

    On a CPU, matrix products of half-precision tensors accumulate in float32 and round the result, as tensor cores do.
    Recurrent layers and cells round their products and results; running sums round every partial result. A
    zero-dimensional tensor is rounded first if all others are in low precision. Other operations run natively in half
    precision, so that intermediate rounding is included. On a GPU everything runs natively. In a format without native
    arithmetic, the operation computes in float32 and its result is rounded. Raises: UnsupportedInFormat if CUDA has no
    half kernel, a constant is out of range, dtypes are mixed, or the operation raises in half precision.
    """
    tensors = tensors_in((args, kwargs))
    asked = any(isinstance(value, Format) for value in (*args, *kwargs.values()))
    if asked or any(carried_in(x) is not None for x in tensors):
        if is_tensor_core(target) and (mixed := _different_dtypes((args, kwargs))):
            raise UnsupportedInFormat(f"{operation_of(target).name} has {mixed}")
        return rounding(target, args, kwargs)
    known = operation_of(target)
    row, on_cpu = _low_format(tensors, known)
    if row is None:
        return wait_for_result(target, _run_discrete(target, known.name, args, kwargs))
    name = known.name
    if on_cpu and row.name in known.refused_on_cuda:
        raise UnsupportedInFormat(f"{name} has no {row.storage} kernel on CUDA")
    if on_cpu and known.powers_of_two:
        result, lengths = fourier_transform(target, args, kwargs, row)
        if odd := [length for length in lengths if length & (length - 1)]:
            said = f"{name} has no {row.storage} kernel on CUDA for length {odd[0]}, which is not a power of two"
            raise UnsupportedInFormat(said)
        return result
    kinds = ((is_tensor_core(target), product), (is_fused_cell(target), run_cell), (known.recurrent, run_layer))
    for run in (run for applies, run in kinds if on_cpu and applies):
        if mixed := _different_dtypes((args, kwargs)):
            raise UnsupportedInFormat(f"{name} has {mixed}")
        return run(target, args, kwargs, row)
    if on_cpu and is_scan(target):
        return run_scan(target, args, kwargs, row)
    wide_sums = on_cpu and known.sums_gradients_in_fp32 and not arguments_of(target, args, kwargs).get("sparse")
    if wide_sums and torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        return in_float32(target, args, kwargs, row)
    if on_cpu and known.promotes:
        args, kwargs = scalars_lowered((args, kwargs))
    try:
        return wait_for_result(target, target(*args, **kwargs))
    except (Exception, SystemExit) as error:  # a user-defined operation may raise anything
        let_through(error)
        why = first_line(error)
        lacking = not known.half_on_cpu and _NO_KERNEL.search(why)
        if on_cpu and (lacking or (known.wide_literals and _TOO_WIDE in why)):
            return in_float32(target, args, kwargs, row)
        raise UnsupportedInFormat(_reason(name, row, error, (args, kwargs)), literal=_TOO_WIDE in why) from error


def _low_format(tensors: Sequence[torch.Tensor], known: Operation) -> tuple[Format | None, bool]:
    """The low-precision format of the tensors (None for FP32 tensors, or if torch promotes to FP32), and whether they
    are on a CPU; Fourier transforms may have complex tensors."""
    promoted = known.promotes and any(x.dtype in (torch.float32, torch.complex64) and x.dim() for x in tensors)
    for x in tensors if not promoted else ():
        dtype = x.dtype.to_real() if known.powers_of_two and x.is_complex() else x.dtype
        if is_low(dtype):
            return format_of(dtype), x.device.type == "cpu"
    return None, False


def _run_discrete(target: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operation on discrete tensors; numbers in the arguments must fit a requested FP16 or BF16 dtype."""
    try:
        return target(*args, **kwargs)
    except RuntimeError as error:
        asked = kwargs.get("dtype")
        if not isinstance(asked, torch.dtype) or not is_low(asked) or _TOO_WIDE not in first_line(error):
            raise
        row = format_of(asked)
        assert row is not None
        raise UnsupportedInFormat(_reason(name, row, error, ()), literal=True) from error


def _different_dtypes(given: Any) -> str:
    """The formats of the floating-point tensors in `given`, in words; "" if all have the same."""
    floats = [x for x in tensors_in(given) if x.is_floating_point()]
    names = {row.name if (row := carried_in(x)) is not None else dtype_name(x.dtype) for x in floats}
    return f"inputs of different dtypes, {' and '.join(sorted(names))}" if len(names) > 1 else ""


def _reason(name: str, row: Format, error: BaseException, given: Any) -> str:
    text = first_line(error)
    if _TOO_WIDE in text:
        return f"{name} has a constant outside the range of {row.storage}"
    if _NO_KERNEL.search(text):
        return f"{name} has {_different_dtypes(given) or f'no {row.storage} kernel here'} ({text[:120]})"
    return f"{name}: {text[:160]}"


def product(target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], row: Format) -> Any:
    """Compute a matrix product or convolution on a CPU in a format, with the rounding of tensor cores."""
    if adds_bias_apart(target, args):
        result: torch.Tensor = product(target, (*args[:2], None), kwargs, row) + args[2]
        return result
    return in_float32(target, args, kwargs, row)


def adds_bias_apart(target: Callable[..., Any], args: tuple[Any, ...]) -> bool:
    """Whether CUDA rounds a linear layer before adding the bias: for non-contiguous inputs of at least 3 dimensions."""
    given = operation_of(target).gemm == "linear" and len(args) == 3 and args[2] is not None
    return given and args[0].dim() > 2 and not args[0].is_contiguous()


def is_tensor_core(target: Callable[..., Any]) -> bool:
    """Whether the operation is a matrix product or convolution that runs on tensor cores."""
    return operation_of(target).product and not mutates(overload_of(target))


def is_product(target: Callable[..., Any]) -> bool:
    """Whether the result is linear in each tensor argument, so that errors of the arguments add up."""
    return operation_of(target).linear and not mutates(overload_of(target))


def promoted_format(given: Sequence[tuple[str, bool]]) -> str:
    """The result format of torch's type promotion. given: (format, whether a scalar) of each tensor, at least one.

    Scalars count only if all are scalars. Two different low-precision formats promote to float32.
    """
    result = {name for name, scalar in given if not scalar} or {name for name, _ in given}
    low = {name for name in result if FORMATS[name].low}
    return max(sorted(result | ({"fp32"} if len(low) > 1 else set())), key=lambda name: FORMATS[name].bytes)


def rounding(target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute `target(*args, **kwargs)` in float32, and round the result to the format that type promotion gives."""
    row = _result(operation_of(target), args, kwargs)
    wide = wait_for_result(target, target(*_wide(args), **_wide(kwargs)))
    if row is None or not row.low:
        return wide
    return over_tensors(lambda x: in_format(x, row) if x.dtype is torch.float32 else x, wide)


def _result(operation: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Format | None:
    """The format of the floating-point results; None if a torch.dtype argument decides, or no tensor is floating."""
    asked = next((value for value in (*args, *kwargs.values()) if isinstance(value, (Format, torch.dtype))), None)
    if asked is not None:
        return asked if isinstance(asked, Format) else None
    given = [(row.name, x.dim() == 0) for x in tensors_in((args, kwargs)) if (row := format_in(x)) is not None]
    if not given:
        return None
    return FORMATS[given[0][0] if operation.dtype_of_first else promoted_format(given)]


def _wide(tree: Any) -> Any:
    """Convert the arguments to float32; dtype arguments that request a format become float32 too."""
    return pytree.tree_map_only(Format, lambda _: torch.float32, widen(tree))
