"""One operation, run in the dtypes of its arguments with the arithmetic a GPU would use."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from functools import cache
from typing import Any

import torch

from ..errors import MeasureError
from ..formats.carried import Carried, in_format, plain
from ..formats.table import Format, format_of, is_low
from ..resources import table
from ..trees import over_tensors, tensors_in
from .nodes import packet_name, settled
from .rounded import asks_for_rounding, rounding

_TENSOR_CORE = frozenset(
    "linear conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d convolution _convolution conv_tbc "
    "matmul mm bmm addmm baddbmm addbmm mv addmv dot vdot einsum bilinear chain_matmul linalg_multi_dot linalg_vecdot "
    "tensordot inner scaled_dot_product_attention _native_multi_head_attention".split()
)
_NOT_LINEAR = frozenset({"scaled_dot_product_attention", "_native_multi_head_attention"})
_NATIVE_PRODUCTS = frozenset("linear conv2d convolution matmul mm bmm".split())
_LARGE = 1 << 14
_NO_KERNEL = re.compile(
    r"not implemented for|not supported for|Unsupported dtype|low precision dtypes|Expected.*(Half|BFloat16)", re.I
)


class UnsupportedInFormat(MeasureError, RuntimeError):
    """The operation refuses the format; the message is the reason, in one clause. A RuntimeError, as CUDA's refusal is."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason, slug="unsupported-op")


def run_op(target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`target(*args, **kwargs)` as a GPU computes it; the result has the dtype that torch gives it.

    On a CPU, matrix products of half-precision tensors round their inputs (they already are), accumulate in float32
    and round the result, as tensor cores do; where the processor has such products for bfloat16, large ones use them.
    Other operations run natively in half, so that half-precision intermediates show. On a GPU everything runs natively.
    In a format without arithmetic of its own, the operation computes in float32 and its result is rounded.
    Raises: UnsupportedInFormat where the operation has no half kernel on CUDA, refuses a literal, or mixes dtypes.
    """
    if asks_for_rounding(args, kwargs):
        if packet_name(target) in _TENSOR_CORE:
            _refuse_mixed(packet_name(target), args, kwargs)
        return rounding(target, args, kwargs)
    row, on_cpu = _low_format(args, kwargs)
    if row is None:
        return settled(target, target(*args, **kwargs))
    name = packet_name(target)
    if _listed(name, "missing_on_cuda"):
        raise UnsupportedInFormat(f"{name} has no {row.storage} kernel on CUDA")
    if on_cpu and name in _TENSOR_CORE:
        _refuse_mixed(name, args, kwargs)
        return product(target, args, kwargs, row)
    try:
        return settled(target, target(*args, **kwargs))
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
        if on_cpu and _listed(name, "missing_on_cpu") and _NO_KERNEL.search(str(error)):
            return in_float32(target, args, kwargs, row)
        raise UnsupportedInFormat(_reason(name, row, error)) from error


def in_float32(target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], row: Format) -> Any:
    """Compute in float32 on the values the arguments have now, and round floating results to the format."""
    args, kwargs = raised(args), raised(kwargs)
    return lowered(target(*args, **kwargs), row)


def raised(tree: Any) -> Any:
    """Low tensors of `tree` as float32; the rest as it is."""
    return over_tensors(lambda x: plain(x).float() if is_low(x.dtype) or isinstance(x, Carried) else x, tree)


def lowered(tree: Any, row: Format) -> Any:
    """Float32 and low tensors of `tree` in a format; float64, complex and discrete ones as they are."""
    return over_tensors(lambda x: in_format(x, row) if x.dtype is torch.float32 or is_low(x.dtype) else x, tree)


def product(target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], row: Format) -> Any:
    """A matrix product or convolution of tensors in a format on a CPU, as tensor cores compute it."""
    if row.dtype is torch.bfloat16 and _has_product(packet_name(target), args):
        return target(*args, **kwargs)
    return in_float32(_fastest(target, args, kwargs), args, kwargs, row)


def _fastest(target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any]:
    """The same product by oneDNN, where torch would take a kernel that needs twice as long on some processors."""
    if kwargs or not _has_onednn() or _differentiated(args):  # oneDNN's own operations have no derivative
        return target
    if target is torch.ops.aten.conv2d.default and is_slow(*args[:2]):
        return conv2d_by_onednn
    if target is torch.ops.aten.linear.default and args[0].numel() >= _LARGE and args[1].numel() >= _LARGE:
        return linear_by_onednn
    if target is torch.ops.aten.addmm.default and args[0].dim() == 1 and min(x.numel() for x in args[1:]) >= _LARGE:
        return lambda bias, x, weight: linear_by_onednn(x, weight.t(), bias)
    return target


def _differentiated(args: tuple[Any, ...]) -> bool:
    return torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in args)


def is_slow(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether a convolution is one with 1x1 filters on one thread, which torch does not leave to oneDNN."""
    one = x.dim() == 4 and x.numel() >= _LARGE and weight.shape[2:] == (1, 1)
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


def _has_product(name: str, args: tuple[Any, ...]) -> bool:
    """Whether this processor multiplies these bfloat16 tensors itself, accumulating in float32 and rounding once."""
    tensors = [x for x in args if isinstance(x, torch.Tensor)]
    large = all(x.dim() > 1 and x.numel() >= _LARGE for x in tensors[:2])
    return name in _NATIVE_PRODUCTS and large and _multiplies_bfloat16() and _has_onednn()


@cache
def _multiplies_bfloat16() -> bool:
    known = getattr(torch.cpu, "_is_avx512_bf16_supported", None)
    return bool(known is not None and known())


def is_tensor_core(target: Callable[..., Any]) -> bool:
    """Whether the operation is a matrix product or convolution that accumulates in float32 on tensor cores."""
    return packet_name(target) in _TENSOR_CORE


def is_product(target: Callable[..., Any]) -> bool:
    """Whether the result is linear in each tensor argument, so that their errors reach it one beside the other."""
    return is_tensor_core(target) and packet_name(target) not in _NOT_LINEAR


def _low_format(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Format | None, bool]:
    low = next((x for x in tensors_in((args, kwargs)) if is_low(x.dtype)), None)
    return (None, False) if low is None else (format_of(low.dtype), low.device.type == "cpu")


@cache
def _listed(name: str, key: str) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in table("ops/half_kernels")[key])


def _refuse_mixed(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    names = {_type_name(x) for x in tensors_in((args, kwargs)) if x.is_floating_point()}
    if len(names) > 1:
        together = " and ".join(sorted(names))
        raise UnsupportedInFormat(f"{name} got {together} together")


def _reason(name: str, row: Format, error: Exception) -> str:
    text = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    if "without overflow" in text:
        return f"{name} has a literal that does not fit {row.storage}"
    if _NO_KERNEL.search(text):
        return f"{name} has no {row.storage} kernel here ({text[:120]})"
    return f"{name}: {text[:160]}"


def _type_name(x: torch.Tensor) -> str:
    return x.format.name if isinstance(x, Carried) else str(x.dtype).removeprefix("torch.")
