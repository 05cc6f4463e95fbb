"""The ranges of the model's inputs."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from ..capture.builder import named_inputs
from ..numerics.entries import extent, tensors_in
from ..numerics.formats import FORMATS, dtype_name
from ..records import Batch, InputRange


def input_ranges(model: nn.Module, batches: Iterable[Batch]) -> tuple[InputRange, ...]:
    """The range of every input tensor over all batches, in the order of the first batch; of its shape and dtype, the
    first batch's."""
    by_input = dict[str, list[Tensor]]()
    for batch in batches:
        names = named_inputs(model, batch)
        for tensor in {id(x): x for x in tensors_in(batch)}.values():
            by_input.setdefault(names.get(id(tensor), "input"), []).append(tensor)
    return tuple(_range_of(name, tensors) for name, tensors in by_input.items())


def _range_of(name: str, tensors: list[Tensor]) -> InputRange:
    first = tensors[0]
    low, high = math.inf, -math.inf
    beyond = nonfinite = 0
    for tensor in tensors:
        values = _entries(tensor)
        finite = values[values.isfinite()]
        nonfinite += values.numel() - finite.numel()
        if finite.numel():
            low = min(low, float(finite.min()))
            high = max(high, float(finite.max()))
        if tensor.is_floating_point() or tensor.is_complex():
            beyond += int((finite.abs() > FORMATS["fp16"].largest).sum())
    known = low <= high
    shape = extent(first) if first.is_nested else first.shape
    return InputRange(
        name=name,
        dtype=dtype_name(first.dtype),
        shape=tuple(int(size) for size in shape if isinstance(size, int)),
        minimum=low if known else None,
        maximum=high if known else None,
        beyond_fp16=beyond,
        nonfinite=nonfinite,
    )


def _entries(tensor: Tensor) -> Tensor:
    """The entries of a tensor of any layout and dtype, as real numbers: [*] -> [n]."""
    values = tensor.detach()
    if values.is_nested:
        values = values.values()
    elif values.layout is not torch.strided:
        values = values.to_dense()
    if values.is_quantized:
        values = values.dequantize()
    if values.is_complex():
        values = torch.view_as_real(values.resolve_conj())
    return values.reshape(-1).double()
