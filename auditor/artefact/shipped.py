"""The strategies that ship: under autocast, with cast weights, and as a graph of its own."""

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


class CastRuntime(Runtime):
    """Every parameter and buffer is stored in its scope's precision, and what enters a scope is converted to it."""

    @staticmethod
    def run(module: nn.Module, inner: Any, precision: str, output: str | None, args: Any, kwargs: Any) -> Any:
        """Run a scope whose weights are stored in `precision`; its result is handed on in `output`.

        output: a precision, "input" for that of the first floating input, None to leave the result as it is.
        """
        given = floating_dtype((args, kwargs)) if output == "input" else None
        args, kwargs = convert((args, kwargs), DTYPES[precision])
        result = call(module, inner, args, kwargs)
        dtype = DTYPES.get(output or "", given)
        return result if dtype is None else convert(result, dtype)

    @staticmethod
    def stored(model: nn.Module, scopes: dict[str, Any]) -> dict[int, str]:
        """All of them, tied ones in FP32 as soon as one of their modules is."""
        return by_scope(named_tensors(model), scopes)


class Cast(Strategy):
    """For inference, at half the memory."""

    name = "cast"
    title = "with cast weights"
    purpose = "weights stored low; for inference"
    runtime = CastRuntime
    rank = 1
    stores = frozenset({"parameter", "buffer", "constant", "input"})

    def boundary(self, precision: str, above: str | None, keeps: bool) -> tuple[str | None, str | None]:
        """Values are converted at every boundary, but where an FP32 scope may keep its result."""
        return precision, None if keeps else above

    def literals(self, node: Node) -> Mapping[str, Literals]:
        """Python sees a model in the format."""
        return node.literals


class GraphRuntime(Runtime):
    """Does nothing to a live module: its plans are programs."""

    @staticmethod
    def stored(model: nn.Module, scopes: dict[str, Any]) -> dict[int, str]:
        """Raises: ValueError."""
        raise ValueError(
            "a plan of strategy graph is no change to a module but a program of its own: "
            "load its file with torch.export.load(FILE).module()"
        )


class Graph(Strategy):
    """For deployment: what runs is the graph, whatever the Python was."""

    name = "graph"
    title = "as a graph"
    purpose = "a program of its own, every operation with its precision; for deployment"
    runtime = GraphRuntime
    rank = 3
    per_operation = True


STRATEGIES: dict[str, Strategy] = {strategy.name: strategy for strategy in (Autocast(), Cast(), Graph())}
