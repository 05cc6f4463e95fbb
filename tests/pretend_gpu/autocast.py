"""`torch.autocast("pretend")`: the operations that torch's CUDA autocast knows, with the casts of CUDA's lists."""

from functools import partial
from typing import Any

import torch

from auditor.numerics.autocast import autocast_arguments
from auditor.numerics.entries import over_tensors
from auditor.numerics.formats import FORMATS, format_of, is_low
from auditor.numerics.nodes import operation_of
from tests.pretend_gpu.memory import NAME

KEY = "AutocastPrivateUse1"
RECURRENT = tuple(f"{name}.{of}" for name in ("lstm", "gru", "rnn_tanh", "rnn_relu") for of in ("input", "data"))
"""What cuDNN runs; its autocast has no other names for them (aten/src/ATen/cudnn/AutocastRNN.cpp)."""

_weights: dict[tuple[int, torch.dtype, bool], tuple[torch.Tensor, torch.Tensor]] = {}
"""A weight is cast once in a region, as `at::autocast::cached_cast` does."""


def register() -> list[torch.library.Library]:
    """Puts the casts in front of the kernels; the answer must be kept."""
    library = torch.library.Library("aten", "IMPL")
    listed = torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCUDA")
    names = [name.removeprefix("aten::") for name in listed if name.startswith("aten::")]
    for name in (*sorted(names), *RECURRENT):
        packet, _, overload = name.partition(".")
        op = getattr(getattr(torch.ops.aten, packet), overload or "default")
        library.impl(name, partial(_cast, op), KEY)
    _forgetting()
    others = torch.library.Library("_", "IMPL", KEY)
    others.fallback(torch.library.fallthrough_kernel)
    return [library, others]


def _cast(op: Any, *args: Any, **kwargs: Any) -> Any:
    with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C._dispatch_key_parse(KEY))):
        row, known = format_of(torch.get_autocast_dtype(NAME)), operation_of(op)
        if known.autocast == "banned":
            raise RuntimeError(f"{op} is unsafe to autocast")
        if row is None or row.name == "fp32":
            return op(*args, **kwargs)
        if known.autocast != "lower":
            args, kwargs = autocast_arguments(str(op), args, kwargs, row)
            return op(*args, **kwargs)
        dtype = FORMATS["fp16"].dtype if known.only_fp16 else row.dtype
        return op(*over_tensors(partial(_lowered, dtype), args), **over_tensors(partial(_lowered, dtype), kwargs))


def _lowered(dtype: torch.dtype, x: torch.Tensor) -> torch.Tensor:
    if x.device.type != NAME or x.dtype is dtype or not (x.dtype is torch.float32 or is_low(x.dtype)):
        return x
    kept = x.requires_grad and x.is_leaf and x.dtype is torch.float32 and not x._is_view()
    if not kept or not torch.is_autocast_cache_enabled():
        return x.to(dtype)
    key = id(x), dtype, torch.is_grad_enabled()
    if key not in _weights or _weights[key][0] is not x:
        _weights[key] = x, x.to(dtype)
    return _weights[key][1]


def _forgetting() -> None:
    """`torch.clear_autocast_cache` knows no such cache."""
    original = torch.clear_autocast_cache

    def clear() -> None:
        original()
        _weights.clear()

    torch.clear_autocast_cache = clear
