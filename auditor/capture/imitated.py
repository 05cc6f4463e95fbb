"""The context manager that users run their own evaluation or training step in, and runs as on a GPU wherever they are."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch

from ..devices import is_native
from ..errors import MeasureError
from .handler import Busy, Traced
from .imitation import Imitation
from .intercept import intercepted

DEVICES = ("cuda",)


class _Open(threading.local):
    depth = 0


_OPEN = _Open()


@contextmanager
def imitated(device: str = "cuda", *, most: int | None = None) -> Iterator[None]:
    """Run what the body runs on a CPU as it would run on `device`, forwards and backwards.

    Example:

        with auditor.imitated("cuda"):
            with torch.autocast("cuda", dtype=torch.float16):
                loss = loss_fn(model(inputs), targets)
            loss.backward()

    Inside, `torch.autocast` of any device type follows CUDA's lists; matrix products of half-precision tensors sum in
    FP32 and round once, and so do their gradients; other operations run in half; what CUDA lacks in half raises
    RuntimeError; random numbers are drawn in FP32 and rounded; `GradScaler("cuda")` scales. Tensors stay on the CPU.
    Compiled functions run eagerly. Afterwards nothing is switched on, however the body ends.
    `torch.autocast("cuda")` and `GradScaler("cuda")` must be made inside: made outside, without CUDA, torch switches
    them off. `backward()` must be called inside as well. Threads that the body starts are not imitated. Nested in the
    same thread, the inner one changes nothing. Tensors on a GPU run natively.
    most: operations after which the body ends with a RuntimeError, for loops that need not end in half.
    Raises: MeasureError(slug="unknown-device"); MeasureError(slug="imitation-busy") where another run, in this thread
    or another, is being recorded or imitated; MeasureError(slug="imitation-ended") where the body traced a model.
    """
    if str(device) not in DEVICES:
        known = ", ".join(repr(name) for name in DEVICES)
        raise MeasureError(f"there is no imitation of {str(device)!r}: known are {known}.", slug="unknown-device")
    with ExitStack() as stack:
        if _OPEN.depth == 0:
            stack.enter_context(_run(most))
        _OPEN.depth += 1
        stack.callback(_leave)
        yield


@contextmanager
def as_on(device: str, most: int | None = None) -> Iterator[None]:
    """Runs as on CUDA: natively on a GPU, imitated elsewhere, and there for at most so many operations."""
    with nullcontext() if is_native(device) else imitated("cuda", most=most):
        yield


@contextmanager
def _run(most: int | None) -> Iterator[None]:
    with ExitStack() as stack:
        try:
            stack.enter_context(intercepted(Imitation(most=most)))
        except Busy as error:
            raise MeasureError(
                "another run is being recorded or imitated, and torch allows one at a time in a process: "
                "let it end before this one begins.",
                slug="imitation-busy",
            ) from error
        stack.enter_context(scaled_as_on_cuda())
        try:
            yield
        finally:
            _close(stack)


def _close(stack: ExitStack) -> None:
    try:
        stack.close()
    except Traced as error:
        raise MeasureError(
            "a tracer such as torch.export ran in the imitated run and ended it: trace the model before or after.",
            slug="imitation-ended",
        ) from error


def _leave() -> None:
    _OPEN.depth -= 1


_Scaler = torch.amp.grad_scaler.GradScaler
_ORIGINAL = _Scaler.__init__


@contextmanager
def scaled_as_on_cuda() -> Iterator[None]:
    """In the body, in this thread, a GradScaler for CUDA is one for the CPU's tensors."""
    thread = threading.get_ident()

    @functools.wraps(_ORIGINAL)
    def init(self: Any, device: str = "cuda", *args: Any, **kwargs: Any) -> None:
        here = threading.get_ident() == thread and not torch.cuda.is_available()
        _ORIGINAL(self, "cpu" if here and device == "cuda" else device, *args, **kwargs)

    _Scaler.__init__ = init  # type: ignore[method-assign]
    try:
        yield
    finally:
        _Scaler.__init__ = _ORIGINAL  # type: ignore[method-assign]
