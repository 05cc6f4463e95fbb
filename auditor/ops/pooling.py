"""Max pooling in the layout that torch's kernel for a CPU is quick in: the same result in a quarter of the time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..formats.entries import is_plain

_CHANNELS = 16
"""Channels from which their entries fill a vector, so that laying them side by side pays."""

_MAX_POOL = torch.ops.aten.max_pool2d.default


def quickest_pooling(target: Callable[..., Any], args: tuple[Any, ...]) -> Callable[..., Any]:
    """What computes a call without keyword arguments in the least time; the operation itself but for max pooling of many channels."""
    if target is not _MAX_POOL or not isinstance(args[0], torch.Tensor):
        return target
    x = args[0]
    by_channels = (
        is_plain(x) and x.dim() == 4 and x.shape[1] >= _CHANNELS and x.is_contiguous() and x.device.type == "cpu"
    )
    differentiated = torch.is_grad_enabled() and x.requires_grad
    return _pooled if by_channels and not differentiated and x.is_floating_point() else target


def _pooled(x: torch.Tensor, *args: Any) -> torch.Tensor:
    """`aten.max_pool2d`. Shapes: [N, C, H, W] -> [N, C, h, w]."""
    result: torch.Tensor = _MAX_POOL(x.contiguous(memory_format=torch.channels_last), *args)
    return result.contiguous()
