"""Fourier transforms of the pretend GPU: torch lets those of float16 through to CUDA alone, and cuFFT takes powers of two."""

from typing import Any

import torch

from auditor.numerics.casting import round_tree, widen
from auditor.numerics.formats import FORMATS
from auditor.numerics.operations import operation
from auditor.numerics.scans import fourier_transform
from auditor.trees import over_tensors, tensors_in
from tests.pretend_gpu.kernels import half, lent
from tests.support.opinfo import infos

NAMES = {"torch.float16": "fp16", "torch.complex32": "fp16", "torch.bfloat16": "bf16"}


def overloads() -> list[Any]:
    """Those that OpInfo knows as transforms with float16 for some lengths."""
    packets = [name for name in infos() if operation(f"aten.{name}").powers_of_two]
    return [getattr(torch.ops.aten, name).default for name in packets]


def run(op: Any, *args: Any, **kwargs: Any) -> Any:
    """As its parts; in float16 with float32 inside. Raises: RuntimeError, as CUDA does."""
    dtype = tensors_in((args, kwargs))[0].dtype
    low = NAMES.get(str(dtype))
    if low is None:
        return op.decompose(*args, **kwargs)
    if not half(op._schema.name.partition("::")[2], low):
        raise RuntimeError(f"Unsupported dtype {dtype}")
    with torch.no_grad():
        _, lengths = fourier_transform(op, over_tensors(lent, args), over_tensors(lent, kwargs), FORMATS["fp16"])
    if any(length & (length - 1) for length in lengths):
        raise RuntimeError(f"cuFFT only supports dimensions whose sizes are powers of two in half precision: {lengths}")
    wide = op.decompose(*widen(args), **widen(kwargs))
    return wide.to(torch.complex32) if wide.is_complex() else round_tree(wide, FORMATS["fp16"])
