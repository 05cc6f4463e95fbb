"""Autocast regions as a GPU would see them: one stack for every device type, and none that switches itself off."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

_DEVICES = ("cpu", "cuda")
_Autocast = torch.amp.autocast_mode.autocast


class Region(NamedTuple):
    """State of autocast where an operation runs. dtype: as `str(dtype)` without its `torch.`."""

    enabled: bool
    dtype: str


class _State(threading.local):
    """What one thread has open. depth_of: how deep the user's module calls are; depths: that, per open region."""

    def __init__(self) -> None:
        self.active = 0
        self.depth_of: Callable[[], int] = lambda: 0
        self.depths: list[int] = []
        self.kept: dict[int, list[list[tuple[str, bool, torch.dtype]]]] = {}


_STATE = _State()
_LOCK = threading.Lock()
_users = 0


def region_now() -> Region:
    """The region that the calling code is in."""
    return Region(torch.is_autocast_enabled("cpu"), str(torch.get_autocast_dtype("cpu")).removeprefix("torch."))


def entered_at() -> int:
    """Number of module calls that were open where the innermost region was entered."""
    return _STATE.depths[-1] if _STATE.depths else 0


@contextmanager
def one_stack(depth_of: Callable[[], int] = lambda: 0) -> Iterator[None]:
    """In the body, in this thread: `torch.autocast` of any device type opens and closes the same region.

    Whoever asks whether autocast is on, for whichever device, gets that region's answer. depth_of: how many module
    calls are open, asked whenever a region is entered. Other threads go on as they were.
    """
    depth, depths = _STATE.depth_of, _STATE.depths
    before = _flags()
    with written_as_meant():
        _STATE.active += 1
        _STATE.depth_of, _STATE.depths = depth_of, []
        _mirror(*_outer(before))
        try:
            yield
        finally:
            _STATE.active -= 1
            _STATE.depth_of, _STATE.depths = depth, depths
            _set(before)


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


def _install() -> None:
    for name, method in (("__init__", _init), ("__enter__", _enter), ("__exit__", _exit)):
        setattr(_Autocast, name, method)


def _uninstall() -> None:
    for name, method in _ORIGINAL.items():
        setattr(_Autocast, name, method)


def _init(
    self: Any,
    device_type: str,
    dtype: torch.dtype | None = None,
    enabled: bool = True,
    cache_enabled: bool | None = None,
) -> None:
    """As torch's own, but for CUDA where there is none: that would warn, and switch itself off."""
    if device_type != "cuda" or torch.cuda.is_available():
        _ORIGINAL["__init__"](self, device_type, dtype, enabled, cache_enabled)
        return
    _ORIGINAL["__init__"](self, device_type, dtype, False, cache_enabled)
    self._enabled = enabled


def _enter(self: Any) -> Any:
    if not _STATE.active:
        return _ORIGINAL["__enter__"](self)
    _STATE.kept.setdefault(id(self), []).append(_flags())
    _STATE.depths.append(_STATE.depth_of())
    _mirror(self._enabled, self.fast_dtype)
    torch.autocast_increment_nesting()
    return self


def _exit(self: Any, *exception: Any) -> Any:
    kept = _STATE.kept.get(id(self)) if _STATE.active else None
    if not kept:
        return _ORIGINAL["__exit__"](self, *exception)
    if torch.autocast_decrement_nesting() == 0:
        torch.clear_autocast_cache()
    _set(kept.pop())
    _STATE.depths.pop()
    return False


def _flags() -> list[tuple[str, bool, torch.dtype]]:
    return [(d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in _DEVICES]


def _set(flags: list[tuple[str, bool, torch.dtype]]) -> None:
    for device, enabled, dtype in flags:
        torch.set_autocast_enabled(device, enabled)
        torch.set_autocast_dtype(device, dtype)


def _mirror(enabled: bool, dtype: torch.dtype) -> None:
    _set([(device, enabled, dtype) for device in _DEVICES])


def _outer(flags: list[tuple[str, bool, torch.dtype]]) -> tuple[bool, torch.dtype]:
    """The region that is open already, CUDA's before the CPU's."""
    for _, enabled, dtype in reversed(flags):
        if enabled:
            return enabled, dtype
    return False, torch.float16
