"""The mode in which a model runs on a CPU as on CUDA: autocast's lists for CUDA, and half kernels that sum in FP32."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..dispatch import Region, intercepted
from ..draws import in_float32, may_draw
from ..errors import MeasureError
from ..fxnodes import mutates, packet_name
from ..numerics.kernels import UnsupportedInFormat, is_tensor_core, run_op
from ..simulation.execute import autocast_arguments

DEVICES = ("cuda",)
_RECURRENT = frozenset("lstm gru rnn_tanh rnn_relu".split())
"""Operations that draw between their layers alone, and whose half kernels are what is wanted."""


class Imitation:
    """Runs operations as CUDA does; see dispatch.Handler.

    lenient: an operation that CUDA refuses in half is computed in FP32 and rounded, instead of raising.
    """

    def __init__(self, lenient: bool = False) -> None:
        self.lenient = lenient

    def whole(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], region: Region) -> Any:
        """The operation in the dtypes that autocast gives it. Raises: UnsupportedInFormat, as CUDA would."""
        return self.part(op, *self.entering(op, args, kwargs, region), region)

    def entering(
        self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], region: Region
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What autocast on CUDA makes of the arguments."""
        if not region.enabled or region.dtype == "float32" or not _is_function(op):
            return args, kwargs
        return autocast_arguments(str(op), args, kwargs, getattr(torch, region.dtype))

    def part(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], region: Region) -> Any:
        """The operation in the dtypes that its arguments have."""
        if not isinstance(op, torch._ops.OpOverload):
            return op(*args, **kwargs)
        if may_draw(op) and not is_tensor_core(op) and packet_name(op) not in _RECURRENT:
            return in_float32(op, args, kwargs)
        try:
            return run_op(op, args, kwargs)
        except UnsupportedInFormat:
            if not self.lenient or mutates(op):
                raise
            return in_float32(op, args, kwargs)


def _is_function(op: Any) -> bool:
    """Whether autocast looks at the operation at all: it leaves those alone that write to their arguments."""
    return isinstance(op, torch._ops.OpOverload) and not mutates(op)


class _Open(threading.local):
    depth = 0


_OPEN = _Open()


@contextmanager
def imitated(device: str = "cuda") -> Iterator[None]:
    """Run what the body runs on a CPU as it would run on `device`, forwards and backwards.

    Example:

        with auditor.imitated("cuda"), torch.autocast("cuda", dtype=torch.float16):
            loss = loss_fn(model(inputs), targets)
            loss.backward()

    Inside, `torch.autocast` of either device type follows CUDA's lists; matrix products of half-precision tensors sum in
    FP32 and round once; other operations run in half; what CUDA lacks in half raises RuntimeError; random numbers are
    drawn in FP32 and rounded. Tensors stay on the CPU. Compiled functions run eagerly. Afterwards nothing is switched on.
    Nested in the same thread, the inner one changes nothing. On a machine with CUDA, run the model there instead.
    Raises: MeasureError(slug="unknown-device"), MeasureError(slug="imitation-busy") where another thread imitates.
    """
    if device not in DEVICES:
        raise MeasureError(
            f"there is no imitation of {device!r}: the device is one of {', '.join(DEVICES)}", slug="unknown-device"
        )
    if _OPEN.depth:
        _OPEN.depth += 1
        try:
            yield
        finally:
            _OPEN.depth -= 1
        return
    with _claimed(), intercepted(Imitation()):
        yield


@contextmanager
def _claimed() -> Iterator[None]:
    _OPEN.depth += 1
    try:
        yield
    finally:
        _OPEN.depth -= 1
