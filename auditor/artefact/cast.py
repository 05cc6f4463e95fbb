"""cast: the model is stored low, as `model.half()` stores it, with FP32 islands whose weights stay FP32."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from ..isolation.members import named_tensors
from ..records import Literals, Node
from .base import Strategy
from .runtime import DTYPES, Runtime, by_scope, call, convert, floating_dtype


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


STRATEGY = Cast()
