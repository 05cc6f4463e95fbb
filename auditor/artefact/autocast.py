"""autocast: weights stay FP32, low scopes run under `torch.autocast`, FP32 ones outside of it."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ..records import Literals, Node
from .base import Strategy
from .runtime import DTYPES, Runtime, call, convert, device_type, in_region


class AutocastRuntime(Runtime):
    """Weights are left alone."""

    regional = True

    @staticmethod
    def run(module: nn.Module, inner: Any, precision: str, output: str | None, args: Any, kwargs: Any) -> Any:
        """Run a scope under autocast in `precision`, or, for fp32, outside autocast on inputs raised to FP32.

        output: "fp32" raises the result, for a low scope inside an FP32 one; autocast itself lowers what must be low.
        """
        device = device_type(module, (args, kwargs))
        if precision == "fp32":
            args, kwargs = convert((args, kwargs), torch.float32)
            outside = functools.partial(torch.autocast, device, enabled=False)
            return in_region(outside, functools.partial(call, module, inner, args, kwargs))
        inside = functools.partial(torch.autocast, device, dtype=DTYPES[precision])
        result = in_region(inside, functools.partial(call, module, inner, args, kwargs))
        return convert(result, torch.float32) if output == "fp32" else result


class Autocast(Strategy):
    """For training and inference."""

    name = "autocast"
    title = "under autocast"
    purpose = "weights stay FP32; also trains"
    runtime = AutocastRuntime
    rank = 0
    trains = True
    regional = True

    def boundary(self, precision: str, above: str | None, keeps: bool) -> tuple[str | None, str | None]:
        """Values are raised on the way into an FP32 scope, and out of a low one that lies in an FP32 one."""
        if precision == "fp32":
            return "fp32", None
        return None, "fp32" if above == "fp32" else None

    def literals(self, node: Node) -> Mapping[str, Literals]:
        """Python sees what autocast returns."""
        return node.autocast_literals


STRATEGY = Autocast()
