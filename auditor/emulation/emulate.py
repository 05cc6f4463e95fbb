"""Emulates CUDA on a CPU: CUDA's autocast lists, and the arithmetic of CUDA's half-precision kernels."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from ..errors import MeasureError
from ..isolation.draws import in_float32
from ..isolation.process import swap_attribute
from ..numerics.autocast import autocast_arguments, autocast_target
from ..numerics.devices import is_native
from ..numerics.entries import over_tensors
from ..numerics.formats import dtype_of, format_of, is_low
from ..numerics.kernels import UnsupportedInFormat, run_op
from ..numerics.nodes import mutates, operation_of
from .intercept import Handler, intercept
from .regions import Region, cast_weight


class Endless(RuntimeError):
    """A run exceeded its maximum number of operations."""


class Emulation(Handler):
    """Runs operations on a CPU with CUDA's autocast dtypes and half-precision arithmetic.

    lenient: compute recurrent layers, and operations without a half kernel on CUDA, in FP32 and round the results.
    most: maximum number of operations, since a loop that waits for two numbers to agree may never end in half
    precision. seen: number of operations so far; casts do not count, since precision plans add casts.
    """

    def __init__(self, lenient: bool = False, most: int | None = None) -> None:
        self.lenient, self.most = lenient, most
        self.seen = 0

    def run_op(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], region: Region) -> Any:
        """Run an operation in the dtypes that CUDA's autocast selects. Raises: Endless, UnsupportedInFormat."""
        return self.run_leaf_op(op, *self.cast_arguments(op, args, kwargs, region), region)

    def cast_arguments(
        self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], region: Region
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """(args, kwargs) after the casts of CUDA's autocast."""
        if not region.enabled or region.dtype == "float32":
            return args, kwargs
        row = format_of(getattr(torch, region.dtype))
        # Autocast casts nothing for operations that write in place.
        writes = not isinstance(op, torch._ops.OpOverload) or mutates(op)
        how = "none" if writes else operation_of(op).autocast
        if how == "none" or row is None:
            return args, kwargs
        if how != "lower":
            return autocast_arguments(str(op), args, kwargs, row)
        target = autocast_target(operation_of(op), row, (), told=False)
        assert target is not None
        dtype = dtype_of(target.name)

        def cast(x: torch.Tensor) -> torch.Tensor:
            movable = x.dtype is torch.float32 or is_low(x.dtype)
            return cast_weight(x, dtype) if x.dtype is not dtype and movable else x

        return over_tensors(cast, args), over_tensors(cast, kwargs)

    def run_leaf_op(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], region: Region) -> Any:
        """Run an operation in the dtypes of its arguments. Raises: Endless, UnsupportedInFormat."""
        plain = not isinstance(op, torch._ops.OpOverload)
        self.seen += plain or not operation_of(op).cast
        if self.most is not None and self.seen > self.most:
            raise Endless(
                f"stopped after {self.most} operations, many more than in FP32: in this format a loop takes longer or never ends"
            )
        if plain:
            return op(*args, **kwargs)
        if self.lenient and operation_of(op).recurrent:
            return in_float32(op, args, kwargs)
        try:
            return run_op(op, args, kwargs)
        except UnsupportedInFormat as error:
            if not self.lenient or (mutates(op) and not error.literal):
                raise
            return in_float32(op, args, kwargs)


_emulating: set[int] = set()
"""Ids of the threads inside `emulate`."""


@contextmanager
def emulate(device: str = "cuda", *, most: int | None = None) -> Iterator[None]:
    """Run the `with` block on a CPU as it would run on `device`, in the forward and the backward pass.

    Example:

        with auditor.emulate("cuda"):
            with torch.autocast("cuda", dtype=torch.float16):
                loss = loss_fn(model(inputs), targets)
            loss.backward()

    In the block, `torch.autocast` of any device type follows CUDA's lists; kernels on half-precision tensors, forwards
    and backwards, compute in FP32 and round once, with the exceptions of CUDA's kernels (docs/emulation.md); an
    operation that CUDA lacks in half precision, or refuses for its mixture of dtypes, raises RuntimeError; random
    numbers are drawn in FP32 and rounded; `GradScaler("cuda")` scales. Tensors are not moved. Compiled functions run
    eagerly. The emulation ends with the block, even if the block raises.
    Create `torch.autocast("cuda")` and `GradScaler("cuda")` in the block: outside, without CUDA, torch disables them.
    Call `backward()` in the block as well. Threads that the block starts are not emulated. A nested call in the same
    thread changes nothing. Tensors on a GPU run natively.
    most: number of operations after which the block ends with a RuntimeError, for loops that may not end in half
    precision.
    Raises: MeasureError(slug="unknown-device") if `device` is not "cuda"; MeasureError(slug="emulation-busy") if
    another run, in this thread or another, is being recorded or emulated; MeasureError(slug="emulation-ended") if the
    block traced a model.
    """
    if str(device) != "cuda":
        raise MeasureError(f"there is no emulation of {str(device)!r}: use emulate('cuda').", slug="unknown-device")
    thread = threading.get_ident()
    if thread in _emulating:
        yield
        return
    _emulating.add(thread)
    try:
        with intercept(Emulation(most=most)), scaled_as_on_cuda():
            yield
    finally:
        _emulating.discard(thread)


@contextmanager
def emulate_unless_native(device: str, most: int | None = None) -> Iterator[None]:
    """In the `with` block, operations run as on CUDA: natively on a GPU, otherwise emulated, with at most `most`
    operations."""
    with nullcontext() if is_native(device) else emulate("cuda", most=most):
        yield


_Scaler = torch.amp.grad_scaler.GradScaler
_ORIGINAL = _Scaler.__init__


@contextmanager
def scaled_as_on_cuda() -> Iterator[None]:
    """In the `with` block, in this thread, a GradScaler for CUDA scales tensors on the CPU if CUDA is absent."""
    thread = threading.get_ident()

    @functools.wraps(_ORIGINAL)
    def init(self: Any, device: str = "cuda", *args: Any, **kwargs: Any) -> None:
        here = threading.get_ident() == thread and not torch.cuda.is_available()
        _ORIGINAL(self, "cpu" if here and device == "cuda" else device, *args, **kwargs)

    with swap_attribute(_Scaler, "__init__", init):
        yield
