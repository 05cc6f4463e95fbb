"""The mode in which a model runs on a CPU as on CUDA: autocast's lists for CUDA, and half kernels that sum in FP32."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from ..isolation.draws import in_float32, may_draw
from ..numerics.autocast import autocast_arguments, autocast_target
from ..numerics.formats import Format, dtype_of, format_of, is_low
from ..numerics.kernels import UnsupportedInFormat, is_tensor_core, run_op
from ..numerics.nodes import mutates, operation_of
from ..trees import over_tensors
from .regions import Region, cast_weight


class Endless(RuntimeError):
    """A run takes far more operations than it should."""


class Imitation:
    """Runs operations as CUDA does; see dispatch.Handler.

    lenient: an operation that CUDA refuses in half is computed in FP32 and rounded, instead of raising.
    most: operations after which the run is ended: a loop until two numbers agree may never end in half. seen: how many
    there were so far, casts aside: where a plan's scopes begin and end, a run in FP32 has none.
    """

    def __init__(self, lenient: bool = False, most: int | None = None) -> None:
        self.lenient, self.most = lenient, most
        self.seen = 0

    def whole(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], region: Region) -> Any:
        """The operation in the dtypes that autocast gives it. Raises: UnsupportedInFormat, as CUDA would."""
        return self.part(op, *self.entering(op, args, kwargs, region), region)

    def entering(
        self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], region: Region
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What autocast on CUDA makes of the arguments."""
        if not region.enabled or region.dtype == "float32":
            return args, kwargs
        how = _treatment(op)
        if how == "none":
            return args, kwargs
        if how != "lower":
            return autocast_arguments(str(op), args, kwargs, _row(region))
        target = autocast_target(operation_of(op), _row(region), (), told=False)
        assert target is not None
        dtype = dtype_of(target.name)

        def cast(x: torch.Tensor) -> torch.Tensor:
            movable = x.dtype is torch.float32 or is_low(x.dtype)
            return cast_weight(x, dtype) if x.dtype is not dtype and movable else x

        return over_tensors(cast, args), over_tensors(cast, kwargs)

    def part(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], region: Region) -> Any:
        """The operation in the dtypes that its arguments have. Raises: Endless, UnsupportedInFormat."""
        self.seen += not _casts(op)
        if self.most is not None and self.seen > self.most:
            raise Endless(
                f"ended after {self.most} operations, many more than FP32 takes: a loop goes on for longer in this format, or for ever"
            )
        if not isinstance(op, torch._ops.OpOverload):
            return op(*args, **kwargs)
        if _draws(op) and not _lets_all_through(op, args, kwargs):
            return in_float32(op, args, kwargs)
        try:
            return run_op(op, args, kwargs)
        except UnsupportedInFormat as error:
            if not self.lenient or (mutates(op) and not error.literal):
                raise
            return in_float32(op, args, kwargs)


@cache
def _treatment(op: Any) -> str:
    """What autocast does to an operation; it leaves those alone that write to their arguments."""
    return operation_of(op).autocast if isinstance(op, torch._ops.OpOverload) and not mutates(op) else "none"


def _row(region: Region) -> Format:
    """The format of a region of autocast, which takes none but those that torch computes in."""
    row = format_of(getattr(torch, region.dtype))
    assert row is not None
    return row


def _casts(op: Any) -> bool:
    return isinstance(op, torch._ops.OpOverload) and operation_of(op).cast


def _draws(op: Any) -> bool:
    """Whether it draws all it does; recurrent layers draw between their layers alone, and their half kernels are wanted."""
    return may_draw(op) and not is_tensor_core(op) and not operation_of(op).recurrent


def _lets_all_through(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether it is a dropout outside of training, which returns what it is given."""
    return operation_of(op).thins and (args[2] if len(args) > 2 else kwargs.get("train")) is False
