"""How recorders hear of a training: hooks of optimizers, and functions of torch that tell of their calls."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any

import torch
from torch import nn

NO_PASS = -1
"""Torch's id of the backward pass if none runs."""


class Several(nn.ModuleList):
    """Several modules that are trained together."""


def inner(optimizer: Any) -> Any:
    """The optimizer of torch inside a wrapper, such as accelerate's or Lightning's."""
    while True:
        attributes = getattr(optimizer, "__dict__", {})
        wrapped = attributes.get("optimizer", attributes.get("_optimizer"))
        if not isinstance(wrapped, torch.optim.Optimizer):
            return optimizer
        optimizer = wrapped


def is_compiled(model: nn.Module) -> bool:
    """Whether `torch.compile` compiles the model."""
    return hasattr(model, "_orig_mod") or getattr(model, "_compiled_call_impl", None) is not None


def is_quiet() -> bool:
    """Whether nothing may be recorded now: torch traces the code, or captures a CUDA graph, whose capture a
    synchronization ends."""
    if torch.compiler.is_compiling():
        return True
    is_on_gpu = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return bool(is_on_gpu and torch.cuda.is_current_stream_capturing())


def is_in_backward() -> bool:
    """Whether a backward pass runs, in which a checkpoint may call the model and `backward` again."""
    return torch._C._current_graph_task_id() != NO_PASS


class Absent:
    """What a pickled or copied recorder becomes: hooks that do nothing."""

    is_off = True

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: None

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        return None


class Hook:
    """A hook of an optimizer, which a pickled optimizer loses. heard: called with the optimizer. waits_for_closure:
    whether a closure computes the gradients inside `step`, after which alone the hook is to be called."""

    def __init__(self, heard: Callable[[Any], Any], waits_for_closure: bool) -> None:
        self._heard = heard
        self._waits = waits_for_closure

    def __call__(self, optimizer: Any, args: Any, kwargs: Any) -> Any:
        """Before or after `step`; returns its arguments if a closure is among them."""
        heard = partial(self._heard, optimizer)
        has_closure = any(map(callable, (*args, *kwargs.values())))
        if not (self._waits and has_closure):
            heard()
            return None
        after_closure = partial(_followed_by, heard)
        given = tuple(after_closure(x) if callable(x) else x for x in args)
        named = {name: after_closure(x) if callable(x) else x for name, x in kwargs.items()}
        return given, named

    def __reduce__(self) -> Any:
        return Absent, ()


def _followed_by(heard: Callable[[], Any], closure: Callable[[], Any]) -> Callable[[], Any]:
    """The closure; after its first call, `heard` is called."""
    waiting = [heard]

    @wraps(closure)
    def run() -> Any:
        value = closure()
        while waiting:
            waiting.pop()()
        return value

    return run


# Functions of torch that tell of their calls. Each is replaced where torch looks it up, once in a process.


@dataclass
class _Heard:
    """A function that is replaced. has_own: whether `holder` defined it itself. replacement: what stands there now."""

    original: Callable[..., Any]
    has_own: bool
    replacement: Callable[..., Any]
    listeners: weakref.WeakSet[Any]


_heard: dict[tuple[Any, str], _Heard] = {}


def listen(holder: Any, name: str, around: Callable[..., Any], listener: Any) -> Callable[[], None]:
    """Replace the function `name` of a module or class by `around(listeners, original, ...)`; returns what undoes this.

    Methods of a class are replaced in the class: an object with methods of its own could not be copied.
    """
    key = holder, name
    if key not in _heard or not _is_in_place(holder, name):
        _heard[key] = _replace(holder, name, around)
    _heard[key].listeners.add(listener)
    return partial(_ignore, holder, name, listener)


def _is_in_place(holder: Any, name: str) -> bool:
    """Whether the replacement still stands there, or inside a wrapper of another library."""
    function = getattr(holder, name)
    while function is not None and function is not _heard[holder, name].replacement:
        function = getattr(function, "__wrapped__", None)
    return function is not None


def _replace(holder: Any, name: str, around: Callable[..., Any]) -> _Heard:
    original = getattr(holder, name)
    listeners: weakref.WeakSet[Any] = weakref.WeakSet()

    @wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        return around(listeners, original, *args, **kwargs)

    has_own = name in vars(holder)
    setattr(holder, name, replacement)
    return _Heard(original, has_own, replacement, listeners)


def _ignore(holder: Any, name: str, listener: Any) -> None:
    """Remove a listener, and with the last one the replacement, unless another library has replaced it since."""
    heard = _heard.get((holder, name))
    if heard is None:
        return
    heard.listeners.discard(listener)
    if heard.listeners or vars(holder).get(name) is not heard.replacement:
        return
    if heard.has_own:
        setattr(holder, name, heard.original)
    else:
        delattr(holder, name)
    del _heard[holder, name]


def around_backward(recorders: Iterable[Any], original: Any, tensors: Any, *args: Any, **kwargs: Any) -> Any:
    """`torch.autograd.backward`, of which every recorder hears, unless it is a part of a backward pass that runs."""
    if not torch.compiler.is_compiling() and not is_in_backward():
        for recorder in list(recorders):
            recorder.guard(recorder.hear_backward, tensors)
    return original(tensors, *args, **kwargs)


def around_scale(recorders: Iterable[Any], original: Any, scaler: Any, outputs: Any) -> Any:
    """`GradScaler.scale`, to know the loss itself."""
    scaled = original(scaler, outputs)
    for recorder in list(recorders):
        if recorder.has_scaler(scaler):
            recorder.guard(recorder.hear_scaled, scaled, outputs)
    return scaled


def around_step(recorders: Iterable[Any], original: Any, scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    """`GradScaler.step`, to know whether it calls the optimizer."""
    listening = [one for one in recorders if one.has_scaler(scaler)]
    counts = [one.updates_of(optimizer) for one in listening]
    result = original(scaler, optimizer, *args, **kwargs)
    for recorder, before in zip(listening, counts, strict=True):
        recorder.guard(recorder.note_skips, before)
    return result
