"""Rounds tensors to a format: in torch's dtype if torch computes in it, otherwise in float32 with a tag."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from .entries import over_tensors, tensors_in
from .formats import FORMATS, Format, format_of, is_low

_SINGLE = 23
"""Fraction bits of float32."""


def round_to(x: torch.Tensor, name: str) -> torch.Tensor:
    """Round `x` to nearest even in the format `name`; the result is float32.

    Shapes: [*] -> [*]. Numbers beyond the format's range become inf, or its largest number if it has no inf.
    """
    return round_in(x, FORMATS[name])


def round_in(x: torch.Tensor, fmt: Format) -> torch.Tensor:
    """Like `round_to`, but for a Format, which need not be registered."""
    if fmt.name == "fp32":
        return x.float()
    if fmt.overflows_to == "largest":
        x = x.clamp(-fmt.largest, fmt.largest)
    if fmt.dtype is not None:
        return x.to(fmt.dtype).float()
    x = x.float()
    # Adding half of the dropped field, plus the kept field's last bit, rounds to nearest even in integer arithmetic.
    bits, drop = x.contiguous().view(torch.int32), _SINGLE - fmt.mantissa
    bits = (bits + (1 << (drop - 1)) - 1 + ((bits >> drop) & 1)) & ~((1 << drop) - 1)
    rounded = torch.where(torch.isfinite(x), bits.view(torch.float32), x)
    if fmt.min_exponent > FORMATS["fp32"].min_exponent:  # else float32's subnormals, rounded above
        steps = torch.round(x / fmt.smallest_subnormal)  # exact: both are float32, one of them a power of two
        rounded = torch.where(x.abs() < fmt.smallest_normal, steps * fmt.smallest_subnormal, rounded)
    if fmt.overflows_to == "inf":
        rounded = torch.where(rounded.abs() > fmt.largest, x * math.inf, rounded)
    return rounded


_MARK = "_carried_format"
"""Attribute that tags a float32 tensor with a format in which torch does not compute. Results of operations on a tensor
with a tag have none: the caller adds the tag."""


def in_format(x: torch.Tensor, row: Format) -> torch.Tensor:
    """Round a tensor to a format: in the format's dtype, or in float32 with a tag. Shapes: [*] -> [*].

    Nested tensors cannot have a tag: if they need a tag, they are returned unchanged.
    """
    if x.is_nested and not x.is_contiguous():
        x = x.contiguous()  # torch converts only contiguous nested tensors
    if row.native:
        return plain(x).to(row.dtype)
    if x.is_nested or carried_in(x) is row:
        return x
    rounded = _round_tensor(plain(x).float(), row.name)
    setattr(rounded, _MARK, row)
    return rounded


def carried_in(x: torch.Tensor) -> Format | None:
    """The format that a float32 tensor is tagged with; None without a tag."""
    result: Format | None = getattr(x, _MARK, None)
    return result


def plain(x: torch.Tensor) -> torch.Tensor:
    """A detached alias without the tag of a tagged tensor; a tensor without a tag is returned unchanged."""
    return x if carried_in(x) is None else x.detach()


def format_in(x: torch.Tensor) -> Format | None:
    """The format of a tensor's values: its tag, or the format of its dtype; None for other dtypes."""
    return carried_in(x) or format_of(x.dtype)


def asked_for(dtype: torch.dtype | Format | None) -> Format | None:
    """The format that a dtype argument requests: a Format itself, or the format of a torch dtype; else None."""
    return format_of(dtype) if isinstance(dtype, torch.dtype) else dtype


def like(x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Round `x` to the format of `other`, in the dtype of `other`."""
    row = format_in(other)
    return x.to(other.dtype) if row is None else in_format(x, row)


def _round_tensor(x: torch.Tensor, name: str) -> torch.Tensor:
    """Round a tensor's entries; of a sparse tensor, the stored entries."""
    if x.layout is torch.strided:
        return round_to(x, name)
    if x.layout is torch.sparse_coo:
        x = x.coalesce()
        return torch.sparse_coo_tensor(x.indices(), round_to(x.values(), name), x.shape, is_coalesced=True)
    by_rows = x.layout in (torch.sparse_csr, torch.sparse_bsr)
    inner, outer = (x.crow_indices(), x.col_indices()) if by_rows else (x.ccol_indices(), x.row_indices())
    return torch.sparse_compressed_tensor(inner, outer, round_to(x.values(), name), x.shape, layout=x.layout)


def in_float32(target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], row: Format) -> Any:
    """Compute `target` on the arguments converted to float32, and round floating-point results to the format."""
    return round_tree(target(*widen(args), **widen(kwargs)), row)  # the FP32 arguments are freed before rounding


def widen(tree: Any) -> Any:
    """Convert low-precision tensors in `tree` to float32, and complex float16 to complex float32."""
    return over_tensors(_wide, tree)


def _wide(x: torch.Tensor) -> torch.Tensor:
    if x.dtype is torch.complex32:
        return x.to(torch.complex64)
    return plain(x).float() if is_low(x.dtype) or carried_in(x) is not None else x


def round_tree(tree: Any, row: Format) -> Any:
    """Round float32 and low-precision tensors in `tree` to a format; other tensors are returned unchanged."""
    return over_tensors(lambda x: in_format(x, row) if x.dtype is torch.float32 or is_low(x.dtype) else x, tree)


def scalars_lowered(tree: Any) -> Any:
    """Cast zero-dimensional tensors to FP16 or BF16 if all other floating-point tensors have that dtype.

    torch ignores scalars in type promotion. CUDA's kernels load scalars in the promoted dtype: a scale of 1e5 is
    infinite next to FP16 values. A CPU multiplies in float32. Source: ATen/native/cuda/Loops.cuh
    (`opmath_symmetric_gpu_kernel_with_scalars`), which excludes only scalars on the CPU; under emulation, every scalar
    counts as one on the GPU.
    """
    wide = {x.dtype for x in tensors_in(tree) if x.dim() and x.is_floating_point()}
    if len(wide) != 1 or not is_low(dtype := wide.pop()):
        return tree
    return over_tensors(lambda x: x.to(dtype) if not x.dim() and x.is_floating_point() else x, tree)
