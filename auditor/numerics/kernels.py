"""One operation, run in the dtypes of its arguments with the arithmetic a GPU would use."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..errors import MeasureError, first_line
from ..raised import let_through
from ..trees import tensors_in
from .carried import carried_in
from .casting import in_float32, scalars_lowered
from .cells import is_fused_cell, run_cell, run_layer
from .formats import Format, format_of, is_low
from .fourier import transformed
from .nodes import operation_of, settled
from .operations import Operation
from .products import is_tensor_core, product
from .rounded import asks_for_rounding, rounding
from .scans import is_scan, scanned

_NO_KERNEL = re.compile(
    r"not implemented for|not supported for|Unsupported dtype|low precision dtypes|Expected.*(Half|BFloat16)", re.I
)
_TOO_WIDE = "without overflow"


class UnsupportedInFormat(MeasureError, RuntimeError):
    """The operation refuses the format; the message is the reason, in one clause. A RuntimeError, as CUDA's refusal is.

    owner: path of the module that it is in, where that is known. literal: whether a number that the author wrote is what
    does not fit.
    """

    def __init__(self, reason: str, owner: str | None = None, *, literal: bool = False) -> None:
        super().__init__(reason, slug="unsupported-op")
        self.owner, self.literal = owner, literal


def run_op(target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`target(*args, **kwargs)` as a GPU computes it; the result has the dtype that torch gives it.

    On a CPU, matrix products of half-precision tensors round their inputs (they already are), accumulate in float32
    and round the result, as tensor cores do. Steps of recurrent layers and cells round their products and what they return.
    Running sums round every partial result, and a tensor of no dimensions beside low ones is rounded before the operation.
    Other operations run natively in half, so that half-precision intermediates show. On a GPU everything runs natively.
    In a format without arithmetic of its own, the operation computes in float32 and its result is rounded.
    Raises: UnsupportedInFormat where the operation has no half kernel on CUDA (on a GPU it is tried), refuses a literal,
    or mixes dtypes.
    """
    tensors = tensors_in((args, kwargs))
    if asks_for_rounding(tensors, args, kwargs):
        if is_tensor_core(target):
            _refuse_mixed(operation_of(target).name, args, kwargs)
        return rounding(target, args, kwargs)
    known = operation_of(target)
    row, on_cpu = _low_format(tensors, known)
    if row is None:
        return settled(target, _made(target, known.name, args, kwargs))
    name = known.name
    if on_cpu and row.name in known.refused_on_cuda:
        raise UnsupportedInFormat(f"{name} has no {row.storage} kernel on CUDA")
    if on_cpu and known.powers_of_two:
        return _of_powers_of_two(target, args, kwargs, row)
    if on_cpu and is_tensor_core(target):
        _refuse_mixed(name, args, kwargs)
        return product(target, args, kwargs, row)
    if on_cpu and is_fused_cell(target):
        _refuse_mixed(name, args, kwargs)
        return run_cell(target, args, kwargs, row)
    if on_cpu and known.recurrent:
        _refuse_mixed(name, args, kwargs)
        return run_layer(target, args, kwargs, row)
    if on_cpu and is_scan(target):
        return scanned(target, args, kwargs, row)
    if on_cpu and known.promotes:
        args, kwargs = scalars_lowered((args, kwargs))
    try:
        return settled(target, target(*args, **kwargs))
    except (Exception, SystemExit) as error:  # an operation of the user's own may raise anything
        let_through(error)
        why = first_line(error)
        lacking = not known.half_on_cpu and _NO_KERNEL.search(why)
        if on_cpu and (lacking or (known.wide_literals and _TOO_WIDE in why)):
            return in_float32(target, args, kwargs, row)
        raise UnsupportedInFormat(_reason(name, row, error), literal=_TOO_WIDE in why) from error


def _low_format(tensors: Sequence[torch.Tensor], known: Operation) -> tuple[Format | None, bool]:
    """The format that the tensors are in, and whether they are on a CPU; a transform's may be of complex numbers."""
    for x in tensors:
        dtype = x.dtype.to_real() if known.powers_of_two and x.is_complex() else x.dtype
        if is_low(dtype):
            return format_of(dtype), x.device.type == "cpu"
    return None, False


def _made(target: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The operation on what is not low; one that is told to give a low dtype may have a literal that does not fit it."""
    try:
        return target(*args, **kwargs)
    except RuntimeError as error:
        asked = kwargs.get("dtype")
        if not isinstance(asked, torch.dtype) or not is_low(asked) or _TOO_WIDE not in first_line(error):
            raise
        row = format_of(asked)
        assert row is not None
        raise UnsupportedInFormat(_reason(name, row, error), literal=True) from error


def _of_powers_of_two(target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], row: Format) -> Any:
    result, lengths = transformed(target, args, kwargs, row)
    if odd := [length for length in lengths if length & (length - 1)]:
        raise UnsupportedInFormat(
            f"{operation_of(target).name} has no {row.storage} kernel on CUDA for a length of {odd[0]}, no power of two"
        )
    return result


def _refuse_mixed(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    names = {_type_name(x) for x in tensors_in((args, kwargs)) if x.is_floating_point()}
    if len(names) > 1:
        together = " and ".join(sorted(names))
        raise UnsupportedInFormat(f"{name} got {together} together")


def _reason(name: str, row: Format, error: BaseException) -> str:
    text = first_line(error)
    if _TOO_WIDE in text:
        return f"{name} has a literal that does not fit {row.storage}"
    if _NO_KERNEL.search(text):
        return f"{name} has no {row.storage} kernel here ({text[:120]})"
    return f"{name}: {text[:160]}"


def _type_name(x: torch.Tensor) -> str:
    return row.name if (row := carried_in(x)) is not None else str(x.dtype).removeprefix("torch.")
