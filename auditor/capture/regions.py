"""Autocast regions as a GPU would see them: one stack for every device type, and none that switches itself off."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import torch

from ..devices import CPU, NATIVE

_Module = torch.amp.autocast_mode
_Autocast = _Module.autocast


class Region(NamedTuple):
    """State of autocast where an operation runs. dtype: as `str(dtype)` without its `torch.`."""

    enabled: bool
    dtype: str


@cache
def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass(eq=False)
class _Stack:
    """What one body of `one_stack` has open. depths: how many module calls were open, per open region.

    casts: {(id of a weight, dtype, whether gradients are on): (the weight, its cast)} since the outermost one opened.
    """

    depth_of: Callable[[], int]
    thread: int
    depths: list[int] = field(default_factory=list)
    casts: dict[tuple[int, torch.dtype, bool], tuple[Any, torch.Tensor]] = field(default_factory=dict)


_Flags = list[tuple[str, bool, torch.dtype]]


class _State(threading.local):
    stack: _Stack | None = None


_STATE = _State()
_LOCK = threading.Lock()
_users = 0
_is_enabled, _dtype = torch.is_autocast_enabled, torch.get_autocast_dtype  # torch's own, which a recording replaces


def region_now() -> Region:
    """The region that the calling code is in."""
    enabled, dtype = _is_enabled(CPU), _dtype(CPU)
    return Region(enabled, _name(dtype))


def entered_at() -> int:
    """Number of module calls that were open where the innermost region was entered."""
    stack = _STATE.stack
    return stack.depths[-1] if stack is not None and stack.depths else 0


def cast_weight(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`x` in `dtype`; inside a region a weight is cast once, so that what its uses add to its gradient is summed low."""
    stack = _STATE.stack
    kept = x.requires_grad and x.is_leaf and x.dtype is torch.float32 and not x._is_view()
    if not kept or stack is None or not stack.depths or not torch.is_autocast_cache_enabled():
        return x.to(dtype)
    key = id(x), dtype, torch.is_grad_enabled()
    known = stack.casts.get(key)
    if known is None or known[0]() is not x:
        known = stack.casts[key] = weakref.ref(x), x.to(dtype)
    return known[1]


@contextmanager
def one_stack(depth_of: Callable[[], int] = lambda: 0) -> Iterator[None]:
    """In the body, in this thread: `torch.autocast` of any device type opens and closes the same region.

    Whoever asks whether autocast is on, for whichever device, gets that region's answer. depth_of: how many module
    calls are open, asked whenever a region is entered. Other threads go on as they were, and so does this one
    afterwards, whatever the body left open.
    """
    outer, before, cached, nesting = _STATE.stack, _flags(), torch.is_autocast_cache_enabled(), _nesting()
    with written_as_meant():
        _STATE.stack = _Stack(depth_of, threading.get_ident())
        try:
            _mirror(*_outer(before))
            yield
        finally:
            _STATE.stack = outer
            _set(before)
            torch.set_autocast_cache_enabled(cached)
            for _ in range(_nesting() - nesting):
                torch.autocast_decrement_nesting()
            if not nesting:
                torch.clear_autocast_cache()


@contextmanager
def ambient(dtype: torch.dtype) -> Iterator[None]:
    """As inside an autocast region of `dtype`; float32 casts nothing, yet whoever switches autocast off then shows it."""
    before = _flags()
    _mirror(True, dtype)
    try:
        yield
    finally:
        _set(before)
        torch.clear_autocast_cache()


@contextmanager
def written_as_meant() -> Iterator[None]:
    """In the body `torch.autocast("cuda")` keeps what its author asked for where there is no CUDA to switch it on."""
    global _users
    with _LOCK:
        _users += 1
        if _users == 1:
            _install()
    try:
        yield
    finally:
        with _LOCK:
            _users -= 1
            if _users == 0:
                _uninstall()


_ORIGINAL = {name: getattr(_Autocast, name) for name in ("__init__", "__enter__", "__exit__")}
_ORIGINAL_CAST = _Module._cast


def _install() -> None:
    for name, method in (("__init__", _init), ("__enter__", _enter), ("__exit__", _exit)):
        setattr(_Autocast, name, method)
    _Module._cast = _cast


def _uninstall() -> None:
    for name, method in _ORIGINAL.items():
        setattr(_Autocast, name, method)
    _Module._cast = _ORIGINAL_CAST


def _init(
    self: Any,
    device_type: str,
    dtype: torch.dtype | None = None,
    enabled: bool = True,
    cache_enabled: bool | None = None,
) -> None:
    """As torch's own, but for CUDA where there is none: that would warn, and switch itself off."""
    absent = device_type == "cuda" and not torch.cuda.is_available()
    _ORIGINAL["__init__"](self, device_type, dtype, enabled and not absent, cache_enabled)
    if absent:
        self._meant = enabled


def _enter(self: Any) -> Any:
    stack = _STATE.stack
    if stack is None:
        return _ORIGINAL["__enter__"](self)
    self.__dict__.setdefault("_entered", []).append((stack, _flags(), torch.is_autocast_cache_enabled()))
    stack.depths.append(stack.depth_of())
    _mirror(getattr(self, "_meant", self._enabled), self.fast_dtype)
    torch.autocast_increment_nesting()
    torch.set_autocast_cache_enabled(self._cache_enabled)
    return self


def _exit(self: Any, *exception: Any) -> Any:
    entered: list[tuple[_Stack, Any, bool]] | None = self.__dict__.get("_entered")
    if not entered or entered[-1][0].thread != threading.get_ident():
        return _ORIGINAL["__exit__"](self, *exception)
    stack, flags, cached = entered.pop()
    if not entered:
        del self._entered
    if stack is not _STATE.stack:  # of a generator that outlives its body: all was put back when that ended
        return False
    if torch.autocast_decrement_nesting() == 0:
        torch.clear_autocast_cache()
    torch.set_autocast_cache_enabled(cached)
    _set(flags)
    stack.depths.pop()
    if not stack.depths:
        stack.casts.clear()
    return False


def _cast(value: Any, device_type: str, dtype: torch.dtype) -> Any:
    """What `custom_fwd` casts: tensors of its device type, for which those on the CPU stand."""
    value = _ORIGINAL_CAST(value, device_type, dtype)
    return value if _STATE.stack is None or device_type == "cpu" else _ORIGINAL_CAST(value, "cpu", dtype)


def _nesting() -> int:
    """Number of regions that torch counts in this thread."""
    torch.autocast_increment_nesting()
    return int(torch.autocast_decrement_nesting())


def _flags() -> _Flags:
    return [(d, _is_enabled(d), _dtype(d)) for d in (CPU, *NATIVE)]


def _set(flags: _Flags) -> None:
    for device, enabled, dtype in flags:
        torch.set_autocast_enabled(device, enabled)
        torch.set_autocast_dtype(device, dtype)


def _mirror(enabled: bool, dtype: torch.dtype) -> None:
    _set([(device, enabled, dtype) for device in (CPU, *NATIVE)])


def _outer(flags: _Flags) -> tuple[bool, torch.dtype]:
    """The region that is open already, CUDA's before the CPU's; without one, what a region of CUDA's is in by default."""
    for _, enabled, dtype in reversed(flags):
        if enabled:
            return enabled, dtype
    return False, flags[-1][2]
