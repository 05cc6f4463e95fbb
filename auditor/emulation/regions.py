"""Emulates a GPU's autocast regions: all device types share one stack, and CUDA's regions are enabled without a GPU."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from ..isolation.process import swap_attribute
from ..numerics.devices import CPU, NATIVE, target_type
from ..numerics.entries import version_of
from ..numerics.formats import dtype_name

_Module = torch.amp.autocast_mode
_Autocast = _Module.autocast
_ORIGINAL = {name: getattr(_Autocast, name) for name in ("__init__", "__enter__", "__exit__")}
_ORIGINAL_CAST = _Module._cast
_Flags = list[tuple[str, bool, torch.dtype]]


class Region(NamedTuple):
    """The autocast state of an operation. dtype: `str(dtype)` without `torch.`."""

    enabled: bool
    dtype: str


class _OpenRegion(NamedTuple):
    """An open autocast region, and the autocast state before it. depth: number of running module calls on entry."""

    region: Any
    flags: _Flags
    cached: bool
    depth: int


@dataclass(eq=False)
class _Stack:
    """The open autocast regions inside `one_stack`.

    casts: {(id of a weight, dtype, whether gradients are on): (weak reference to the weight, its version, its cast)}.
    """

    depth_of: Callable[[], int]
    entered: list[_OpenRegion] = field(default_factory=list)
    casts: dict[tuple[int, torch.dtype, bool], tuple[Any, int, torch.Tensor]] = field(default_factory=dict)


class _State(threading.local):
    stack: _Stack | None = None


_STATE = _State()


def region_now() -> Region:
    """The autocast state of the calling code."""
    return Region(torch.is_autocast_enabled(CPU), dtype_name(torch.get_autocast_dtype(CPU)))


def entered_at() -> int:
    """Number of running module calls on entry of the innermost open autocast region; 0 if none is open."""
    stack = _STATE.stack
    return stack.entered[-1].depth if stack is not None and stack.entered else 0


def cast_weight(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Cast `x` to `dtype`. In an autocast region a weight is cast only once, so that the gradients of all its uses are
    summed in low precision."""
    stack = _STATE.stack
    kept = x.requires_grad and x.is_leaf and x.dtype is torch.float32 and not x._is_view()
    if not kept or stack is None or not stack.entered or not torch.is_autocast_cache_enabled():
        return x.to(dtype)
    key = id(x), dtype, torch.is_grad_enabled()
    known = stack.casts.get(key)
    if known is None or known[0]() is not x:
        known = stack.casts[key] = weakref.ref(x), version_of(x), x.to(dtype)
    return known[2]


def is_outdated(x: torch.Tensor, cast: torch.Tensor) -> bool:
    """Whether `cast` is that of a weight from before its last change, which the open autocast region keeps."""
    known = _STATE.stack.casts.get((id(x), cast.dtype, torch.is_grad_enabled())) if _STATE.stack is not None else None
    return known is not None and known[2] is cast and known[1] != version_of(x)


def clear_weight_casts() -> None:
    """Clear the cache of weight casts, as torch does when the outermost autocast region ends."""
    if _STATE.stack is not None:
        _STATE.stack.casts.clear()


@contextmanager
def one_stack(depth_of: Callable[[], int] = lambda: 0, around: torch.dtype | None = None) -> Iterator[None]:
    """In the `with` block, in this thread, `torch.autocast` regions of all device types share one stack.

    Queries of the autocast state, for any device, return the innermost region's. depth_of: returns the number of
    running module calls, called on each entry of a region. around: the dtype of a region around the block; float32
    casts nothing, but shows where autocast is disabled. Other threads are unaffected, and this thread is restored
    afterwards, even if the block left regions open.
    """
    outer, before, cached, nesting = _STATE.stack, _flags(), torch.is_autocast_cache_enabled(), _nesting_depth()
    with written_as_meant():
        _STATE.stack = _Stack(depth_of)
        try:
            # Start with the open region, CUDA's before the CPU's; if none is open: disabled, with the last one's dtype.
            shared = [(enabled, dtype) for device, enabled, dtype in before if device in _mirrored()]
            opened = next((each for each in reversed(shared) if each[0]), (False, shared[-1][1]))
            _mirror(*(opened if around is None else (True, around)))
            yield
        finally:
            _STATE.stack = outer
            _set(before)
            torch.set_autocast_cache_enabled(cached)
            for _ in range(_nesting_depth() - nesting):
                torch.autocast_decrement_nesting()
            if not nesting:
                torch.clear_autocast_cache()


@contextmanager
def written_as_meant() -> Iterator[None]:
    """In the `with` block, `torch.autocast("cuda")` keeps its settings without CUDA; torch itself would disable it."""
    with ExitStack() as stack:
        for name, method in (("__init__", _init), ("__enter__", _enter), ("__exit__", _exit)):
            stack.enter_context(swap_attribute(_Autocast, name, method))
        stack.enter_context(swap_attribute(_Module, "_cast", _cast))
        yield


def _init(self: Any, device_type: str, dtype: Any = None, enabled: bool = True, cache_enabled: Any = None) -> None:
    """Like torch's `__init__`, but without the warning for CUDA without a GPU; `_meant` stores the requested state."""
    absent = device_type == "cuda" and not torch.cuda.is_available()
    _ORIGINAL["__init__"](self, device_type, dtype, enabled and not absent, cache_enabled)
    if absent:
        self._meant = enabled


def _enter(self: Any) -> Any:
    stack = _STATE.stack
    if stack is None:
        return _ORIGINAL["__enter__"](self)
    stack.entered.append(_OpenRegion(self, _flags(), torch.is_autocast_cache_enabled(), stack.depth_of()))
    if self.device in _mirrored():
        _mirror(getattr(self, "_meant", self._enabled), self.fast_dtype)
    torch.autocast_increment_nesting()
    torch.set_autocast_cache_enabled(self._cache_enabled)
    return self


def _exit(self: Any, *exception: Any) -> Any:
    stack = _STATE.stack
    entered = [one for one in stack.entered if one.region is self] if stack is not None else []
    if stack is None or not entered:  # entered in another thread, or by a generator that outlived the body
        return _ORIGINAL["__exit__"](self, *exception) if hasattr(self, "prev") else False
    stack.entered.remove(entered[-1])
    if torch.autocast_decrement_nesting() == 0:
        torch.clear_autocast_cache()
    torch.set_autocast_cache_enabled(entered[-1].cached)
    _set(entered[-1].flags)
    if not stack.entered:
        stack.casts.clear()
    return False


def _cast(value: Any, device_type: str, dtype: torch.dtype) -> Any:
    """Cast as `custom_fwd` does: tensors of its device type; inside `one_stack` also tensors on a CPU."""
    value = _ORIGINAL_CAST(value, device_type, dtype)
    return value if _STATE.stack is None or device_type == "cpu" else _ORIGINAL_CAST(value, "cpu", dtype)


def _nesting_depth() -> int:
    """Depth of nested autocast regions that torch counts in this thread."""
    torch.autocast_increment_nesting()
    return int(torch.autocast_decrement_nesting())


def _flags() -> _Flags:
    return [(d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in (CPU, *NATIVE)]


def _set(flags: _Flags) -> None:
    for device, enabled, dtype in flags:
        torch.set_autocast_enabled(device, enabled)
        torch.set_autocast_dtype(device, dtype)


def _mirrored() -> tuple[str, ...]:
    """The device types whose regions share one stack; where the CPU is the target, other regions have no effect."""
    return (CPU,) if target_type() == CPU else (CPU, *NATIVE)


def _mirror(enabled: bool, dtype: torch.dtype) -> None:
    _set([(device, enabled, dtype) for device in _mirrored()])
