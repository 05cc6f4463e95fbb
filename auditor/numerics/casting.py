"""Values in another precision: raised to float32, lowered to a format, and an operation computed in float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..trees import over_tensors, tensors_in
from .carried import carried_in, in_format, plain
from .formats import Format, is_low


def in_float32(target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], row: Format) -> Any:
    """Compute in float32 on the values the arguments have now, and round floating results to the format."""
    args, kwargs = raised(args), raised(kwargs)
    return lowered(target(*args, **kwargs), row)


def raised(tree: Any) -> Any:
    """Low tensors of `tree` as float32, pairs of float16 as those of float32; the rest as it is."""
    return over_tensors(_wide, tree)


def _wide(x: torch.Tensor) -> torch.Tensor:
    if x.dtype is torch.complex32:
        return x.to(torch.complex64)
    return plain(x).float() if is_low(x.dtype) or carried_in(x) is not None else x


def lowered(tree: Any, row: Format) -> Any:
    """Float32 and low tensors of `tree` in a format; float64, complex and discrete ones as they are."""
    return over_tensors(lambda x: in_format(x, row) if x.dtype is torch.float32 or is_low(x.dtype) else x, tree)


def scalars_lowered(tree: Any) -> Any:
    """Floating tensors of no dimensions in the low dtype that all those with dimensions have; where they have another, as they are.

    torch leaves them out when it promotes; the GPU's kernels then load them in the promoted dtype, so that a scale of 1e5 is infinite
    beside FP16 values, where the CPU's multiply by it in float32. Source: ATen/native/cuda/Loops.cuh
    (`opmath_symmetric_gpu_kernel_with_scalars`), which spares only scalars that lie on the CPU: here all lie there, and
    none is taken for such a one.
    """
    wide = {x.dtype for x in tensors_in(tree) if x.dim() and x.is_floating_point()}
    if len(wide) != 1 or not is_low(dtype := wide.pop()):
        return tree
    return over_tensors(lambda x: x.to(dtype) if not x.dim() and x.is_floating_point() else x, tree)
