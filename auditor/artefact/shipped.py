"""The three built-in strategies: autocast, weights cast to low precision, and an exported graph."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ..isolation.members import named_tensors
from ..records import Literals, Node
from .base import Strategy
from .runtime import DTYPES, Runtime, by_scope, call, convert, device_type, floating_dtype, in_region


class AutocastRuntime(Runtime):
    """Wraps modules in autocast regions; weights are not converted."""

    regional = True

    @staticmethod
    def run(module: nn.Module, inner: Any, precision: str, output: str | None, args: Any, kwargs: Any) -> Any:
        """Run a scope under autocast in `precision`; for fp32, outside autocast on FP32 inputs.

        output: "fp32" converts the result, for a low-precision scope inside an FP32 scope; elsewhere autocast
        converts the result as needed.
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
    """FP32 weights, low-precision operations: for training and inference."""

    name = "autocast"
    title = "under autocast"
    runtime = AutocastRuntime
    rank = 0
    trains = True
    regional = True

    def boundary(self, precision: str, above: str | None, keeps: bool) -> tuple[str | None, str | None]:
        """Convert to FP32: inputs of an FP32 scope, and results of the low-precision scopes inside an FP32 scope."""
        if precision == "fp32":
            return "fp32", None
        return None, "fp32" if above == "fp32" else None

    def literals(self, node: Node) -> Mapping[str, Literals]:
        """Constants that Python code derives from the dtypes that autocast returns."""
        return node.autocast_literals


class CastRuntime(Runtime):
    """Stores every parameter and buffer in its scope's precision, and converts a scope's inputs to that precision."""

    @staticmethod
    def run(module: nn.Module, inner: Any, precision: str, output: str | None, args: Any, kwargs: Any) -> Any:
        """Run a scope whose weights are stored in `precision`, and convert its result to `output`.

        output: a precision, "input" for the first floating-point input's dtype, None to leave the result unconverted.
        """
        given = floating_dtype((args, kwargs)) if output == "input" else None
        args, kwargs = convert((args, kwargs), DTYPES[precision])
        result = call(module, inner, args, kwargs)
        dtype = DTYPES.get(output or "", given)
        return result if dtype is None else convert(result, dtype)

    @staticmethod
    def storage_precisions(model: nn.Module, scopes: dict[str, Any]) -> dict[int, str]:
        """{id of a parameter or buffer: its precision}; FP32 if any module that has this tensor is FP32."""
        return by_scope(named_tensors(model), scopes)


class Cast(Strategy):
    """Low-precision weights and operations: for inference, at half the memory."""

    name = "cast"
    title = "with cast weights"
    runtime = CastRuntime
    rank = 1
    stores = frozenset({"parameter", "buffer", "constant", "input"})

    def boundary(self, precision: str, above: str | None, keeps: bool) -> tuple[str | None, str | None]:
        """Convert values at every scope boundary, except results of FP32 scopes that only FP32 operations read."""
        return precision, None if keeps else above

    def literals(self, node: Node) -> Mapping[str, Literals]:
        """Constants that Python code derives from the dtype of a model stored in the format."""
        return node.literals


class GraphRuntime(Runtime):
    """Patches nothing: plans of the strategy `graph` are exported programs."""

    @staticmethod
    def storage_precisions(model: nn.Module, scopes: dict[str, Any]) -> dict[int, str]:
        """Raises ValueError: a plan that is an exported program cannot patch a live module."""
        raise ValueError(
            "a plan of strategy graph cannot be applied to a module: the plan is an exported program, "
            "loaded from its file with torch.export.load(FILE).module()"
        )


class Graph(Strategy):
    """An exported graph with a precision for each operation: for deployment."""

    name = "graph"
    title = "as a graph"
    runtime = GraphRuntime
    rank = 3


BY_NAME: dict[str, Strategy] = {strategy.name: strategy for strategy in (Autocast(), Cast(), Graph())}
