"""The flight recorder: watches a user's training, and saves the step that goes wrong. It never changes the training."""

from __future__ import annotations

import itertools
import logging
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial, wraps
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils import _pytree as pytree

from . import capsule as files
from .before import Called, Group
from .hooks import (
    Absent,
    Hook,
    Several,
    around_backward,
    around_scale,
    around_step,
    inner,
    is_compiled,
    is_in_backward,
    is_quiet,
    listen,
)
from .meter import Meter
from .saving import capsule_of, rank_of_process
from .signals import HISTORY, Judge, Signal, Trigger
from .watched import Watched

logger = logging.getLogger("auditor.watch")

MOST = 3
"""Default number of capsules that a recorder writes."""
CALLS = 64
"""Largest number of calls of the step that are kept if no update ends them."""

Function = TypeVar("Function", bound=Callable[..., Any])

_inert: list[Recorder] | None = None
"""During a replay, the recorders that the user's file has created, which do nothing."""


_orders = itertools.count()
"""Counts the recorders of this process."""


@contextmanager
def inert_recorders() -> Iterator[list[Recorder]]:
    """In the `with` block, recorders do nothing; gives those that are created, for the replay to know their objects."""
    global _inert
    before, _inert = _inert, []
    try:
        yield _inert
    finally:
        _inert = before


class Recorder:
    """Watches training, see `watch`. capsules: paths of the capsules that were written. number: of the present step."""

    def __init__(
        self,
        watched: Watched,
        folder: Path,
        keep: int,
        log: Callable[..., Any] | None,
        most: int,
        draws: bool | None,
    ) -> None:
        self.watched = watched
        self.folder = folder
        self.capsules: list[Path] = []
        self.number = 0
        self.is_off = False
        self._order = next(_orders)
        self._log = log
        self._most = most
        self._keeps_inputs = _is_on_gpu(watched.model) if draws is None else draws
        self._has_step = False  # whether the user's step is decorated, or begins with `begin`
        self._depth = 0  # of calls of the decorated step
        self._is_found = False  # whether the state that the step reads is known
        self._opens_inside = False  # whether an autocast region was opened inside the model
        self._is_copied = False  # whether batches are copied, since a step has written to one
        self._group = Group()
        self._earlier: deque[list[Called]] = deque(maxlen=max(keep - 1, 0))
        self._seen: set[str] = set()  # kinds of the capsules
        self._judges = [Judge() for _ in watched.optimizers]
        self._signals: deque[Signal] = deque(maxlen=HISTORY)
        self._meters = [Meter(watched, number) for number in range(len(watched.optimizers))]
        self._undo: list[Callable[[], None]] = []
        self._inner_handles: list[Any] = []  # of hooks inside the model, see `_inside`

    @property
    def model(self) -> nn.Module:
        """The model that is trained, or all of them as one module."""
        return self.watched.model

    @property
    def optimizers(self) -> list[Any]:
        """The optimizers of torch, without wrappers."""
        return self.watched.optimizers

    @property
    def scalers(self) -> list[Any]:
        """The GradScalers."""
        return self.watched.scalers

    # What the user calls.

    def step(self, function: Function) -> Function:
        """Watch a function that runs one training step; use it as a decorator."""
        self.watched.name_step(function)
        if self.is_off:
            return function
        self._has_step = True

        @wraps(function)
        def watched(*args: Any, **kwargs: Any) -> Any:
            if self.is_off or self._depth or is_quiet():
                return function(*args, **kwargs)
            self.guard(self._begin, (args, kwargs))
            self._depth += 1
            try:
                value = function(*args, **kwargs)
            except BaseException as error:
                self.guard(self._raised, error)
                raise
            finally:
                self._depth -= 1
            self.guard(self._end, value)
            return value

        return watched  # type: ignore[return-value]

    def begin(self, *args: Any, **kwargs: Any) -> None:
        """Tell the batch of a step that begins, in a loop whose step is not a function of its own: call it before the
        forward pass. The step ends with its update."""
        self._has_step = True
        if not self.is_off and not is_quiet():
            self.guard(self._begin, (args, kwargs))

    def save(self, reason: str = "asked for") -> Path | None:
        """Write a capsule of the present step; returns its path, None if that failed."""
        if not self.is_off:
            self.guard(self._write, Trigger("asked", reason), None)
        return self.capsules[-1] if self.capsules else None

    def close(self) -> None:
        """End watching: remove all hooks."""
        self.is_off = True
        for undo in self._undo:
            undo()
        self._undo.clear()
        self._remove_inner_hooks()
        self._group = Group()
        self._earlier.clear()

    def __reduce__(self) -> Any:
        return Absent, ()

    # What it hears.

    def attach(self) -> None:
        """Hook into the model, the optimizers, the scalers and `backward`."""
        handles: list[Any] = []
        for model in self.watched.models:
            handles.append(model.register_forward_pre_hook(self._forward, with_kwargs=True))
            if not is_compiled(model):
                self._inner_handles += [one.register_forward_pre_hook(self._inside) for one in model.children()]
        for number, optimizer in enumerate(self.optimizers):
            before = partial(self._hear_update, self._before, number)
            after = partial(self._hear_update, self._after, number)
            handles.append(optimizer.register_step_pre_hook(Hook(before, waits_for_closure=True)))
            handles.append(optimizer.register_step_post_hook(Hook(after, waits_for_closure=False)))
        self._undo += [handle.remove for handle in handles]
        self._undo.append(listen(torch.autograd, "backward", around_backward, self))
        for kind in {type(scaler) for scaler in self.scalers}:
            self._undo.append(listen(kind, "scale", around_scale, self))
            self._undo.append(listen(kind, "step", around_step, self))

    def guard(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function of this recorder; an exception ends the recording, and the training goes on."""
        if self.is_off:
            return None
        try:
            return function(*args)
        except Exception as error:
            with suppress(Exception):
                logger.warning("stops watching, since it failed (%s: %s)", type(error).__name__, error)
                self.close()
            self.is_off = True
            return None

    def _forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """The model is called. A checkpoint calls it again inside the backward pass."""
        is_training = module.training and torch.is_grad_enabled()
        if is_training and not self.is_off and not is_quiet() and not is_in_backward():
            self.guard(self._hear_forward, module, args, kwargs)

    def _hear_forward(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        if not self._has_step:
            self._begin((args, kwargs))
        group = self._group
        group.autocast = group.autocast or _autocast()
        if group.calls and self._keeps_inputs:
            group.calls[-1].inputs.append((model, args, kwargs))

    def _inside(self, module: nn.Module, args: Any) -> None:
        """A part of the model is called: accelerate opens its autocast region inside the model's forward."""
        if self.is_off or torch.compiler.is_compiling():
            return
        group = self._group
        if group.calls and not group.autocast:
            group.autocast = _autocast()
            self._opens_inside = bool(group.autocast)

    def _remove_inner_hooks(self) -> None:
        for handle in self._inner_handles:
            handle.remove()
        self._inner_handles.clear()

    def has_scaler(self, scaler: Any) -> bool:
        """Whether this GradScaler is watched."""
        return not self.is_off and any(one is scaler for one in self.scalers)

    def hear_scaled(self, scaled: Any, loss: Any) -> None:
        """A GradScaler has scaled a loss."""
        if isinstance(loss, torch.Tensor):
            self._group.scaled = scaled, loss

    def hear_backward(self, roots: Any) -> None:
        """A backward pass begins at these tensors."""
        group = self._group
        scaled: Any
        loss: Any
        scaled, loss = group.scaled or (None, None)
        for root in roots if isinstance(roots, list | tuple) else [roots]:
            if isinstance(root, torch.Tensor) and root.numel() == 1:
                group.losses.append((loss if root is scaled else root).detach())
        del group.losses[:-CALLS]
        group.scaled = None

    def updates_of(self, optimizer: Any) -> dict[int, int]:
        """{number of the optimizer: its updates} until now."""
        own = inner(optimizer)
        return {i: self._meters[i].updates for i, one in enumerate(self.optimizers) if one is own}

    def note_skips(self, before: dict[int, int]) -> None:
        """A GradScaler's `step` has ended. before: the updates at its begin; without a further one, it was skipped."""
        for number, count in before.items():
            if self._meters[number].updates == count:
                self._skipped(number)

    def _hear_update(self, heard: Callable[..., None], number: int, optimizer: Any) -> None:
        if not is_quiet():
            self.guard(heard, number)

    # The course of a step.

    def _begin(self, batch: Any) -> None:
        """Before a call of the step: note the batch, the generators, and the buffers before the first call."""
        if self._group.updated and not self._depth:
            self._finish()
        if not self._is_found:
            self._is_found = True
            self.watched.find_state()
        calls = self._group.calls
        if not calls:
            self._group.losses.clear()  # of other trainings
            for buffers in self.watched.buffers.values():
                buffers.save()
        calls.append(self.watched.begin(batch, self._is_copied))
        del calls[:-CALLS]

    def _end(self, value: Any) -> None:
        """After a call of the decorated step."""
        if self._group.updated:
            self._finish()
            return
        for x in pytree.tree_leaves(value):
            if isinstance(x, torch.Tensor) and x.numel() == 1 and x.is_floating_point():
                self._group.returned.append(x.detach())

    def _raised(self, error: BaseException) -> None:
        """The step raised an exception: the user's own check of the loss, for example. An interruption is none."""
        if isinstance(error, Exception):
            text = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            self._write(Trigger("raised", f"the step raised {text}"), None, error=text)
        if self._group.updated:
            self._finish()
        else:
            del self._group.calls[-1:]  # earlier calls may have left gradients for the next update

    def _finish(self) -> None:
        """After the update that ends a step."""
        calls = self._group.calls
        if self._inner_handles and calls and not self._opens_inside:
            self._remove_inner_hooks()
        self._is_copied = self._is_copied or any(call.is_written() for call in calls)
        for buffers in self.watched.buffers.values():
            buffers.note_changes()
        for call in calls:
            call.forget()
        self._earlier.append(calls)
        self._group = Group()
        self.number += 1

    def _before(self, number: int) -> None:
        """Before an update, with the weights as they were."""
        self._hear(self._meters[number].before(self.number, self._group))

    def _after(self, number: int) -> None:
        """After an update."""
        self._meters[number].after()
        self._end_update(number)

    def _skipped(self, number: int) -> None:
        """A GradScaler has skipped an update."""
        self._hear(self._meters[number].skipped(self.number, self._group))
        self._end_update(number)

    def _end_update(self, number: int) -> None:
        """After an update, or a skipped one."""
        group = self._group
        group.updated.append(number)
        group.losses.clear()
        group.returned.clear()
        if not self._has_step:
            self._finish()

    def _hear(self, signal: Signal) -> None:
        """Judge a signal, log it, and write a capsule if there is a reason."""
        triggers = self._judges[signal.optimizer].judge(signal)
        self._signals.append(signal)
        if self._log is not None:
            self._log(signal.named(), signal.step)
        new = [one for one in triggers if one.kind not in self._seen]
        if new:  # one capsule of a step, which names all that was seen
            self._write(Trigger(new[0].kind, "; ".join(one.text for one in new)), signal)

    @torch.no_grad()
    def _write(self, trigger: Trigger, signal: Signal | None, error: str = "") -> None:
        """Write a capsule, unless there is one of this kind already."""
        if trigger.kind in self._seen or len(self.capsules) >= self._most:
            return
        self._seen.add(trigger.kind)
        rank, world = rank_of_process()
        scale = self.watched.scale(0)
        about = {
            "step": self.number,
            "rank": rank,
            "world": world,
            "order": self._order,
            "scale": signal.scale if signal else _number(scale),
            "loss": signal.loss if signal else None,
            "norm": signal.norm if signal else None,
            "is_whole_step": self._has_step,
            "error": error,
        }
        name = f"step-{self.number:06d}-{trigger.kind}"
        if world > 1:
            name += f"-rank{rank}"
        try:
            made = capsule_of(self.watched, self._group, self._earlier, trigger, self._signals, about)
            path = files.write(made, self.folder, name)
        except Exception as failure:
            said = f"{type(failure).__name__}: {failure}"
            logger.warning("step %d: %s; no capsule could be written (%s)", self.number, trigger.text, said)
            return
        self.capsules.append(path)
        logger.warning("step %d: %s; capsule in %s", self.number, trigger.text, path)


def watch(
    model: Any,
    optimizer: Any,
    scaler: Any = None,
    folder: str | os.PathLike[str] = "capsules",
    keep: int = 2,
    *,
    log: Callable[..., Any] | None = None,
    most: int = MOST,
    frozen: Any = None,
    draws: bool | None = None,
) -> Recorder:
    """Watch a training, and write a capsule of the step in which something goes wrong. The training itself is unchanged.

        recorder = auditor.watch(model, optimizer, scaler)

        @recorder.step
        def step(x, y): ...

    Reasons for a capsule: a loss or gradients that are not finite; skipped steps that the search for a loss scale does
    not explain; a loss scale that collapses; spikes; gradients that underflow to zero; updates that change no weight;
    gradients that are clipped while scaled; an exception in the step. A line in the log `auditor.watch` says so. There
    is at most one capsule of a kind, and at most `most` in all. `python -m auditor replay CAPSULE` explains it.

    model: the module that is trained, or a list of modules. optimizer, scaler: one or several, as a list. folder: for the capsules. keep:
    number of steps whose batches are kept, the present one included. log: called as log({name: value}, step) with the
    signals of each update. frozen: files (.pt or .safetensors) with weights that are not trained, to which capsules
    refer instead of containing them. draws: whether to save the random numbers of the model's forward pass; by default
    on a GPU. Raises: TypeError if `model` is not a module or `optimizer` not an optimizer.
    """
    optimizers = _several(optimizer)
    if isinstance(model, list | tuple) and all(isinstance(one, nn.Module) for one in model):
        model = Several(model)
    if not isinstance(model, nn.Module):
        raise TypeError(f"auditor.watch needs a model, not a value of type {type(model).__name__}")
    if not optimizers or not all(hasattr(inner(one), "register_step_pre_hook") for one in optimizers):
        raise TypeError("auditor.watch needs an optimizer of torch, or a list of optimizers")
    scalers = _several(scaler) or _own_scalers(optimizers)
    if _inert is None:
        scalers = [one for one in scalers if getattr(one, "_enabled", True)]
    watched = Watched(model, optimizers, scalers, frozen)
    recorder = Recorder(watched, Path(folder), keep, log, most, draws)
    if _inert is not None:
        recorder.is_off = True
        _inert.append(recorder)
        return recorder
    recorder.guard(files.remove_drafts, recorder.folder)
    recorder.guard(recorder.attach)
    return recorder


def _own_scalers(optimizers: Sequence[Any]) -> list[Any]:
    """The GradScalers that accelerate's optimizers know."""
    known = {id(one): getattr(one, "scaler", None) for one in optimizers}
    return [one for one in known.values() if one is not None]


def _several(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


def _is_on_gpu(model: nn.Module) -> bool:
    """Whether the model draws its random numbers on a GPU: a CPU repeats its own from the states of its generators, but
    not those of a GPU."""
    return next((p.device.type for p in model.parameters()), "cpu") != "cpu"


def _autocast() -> dict[str, str]:
    """{device: dtype} of the autocast regions that are open."""
    devices = ("cpu", "cuda")
    return {one: str(torch.get_autocast_dtype(one)).split(".")[-1] for one in devices if torch.is_autocast_enabled(one)}


def _number(x: torch.Tensor | None) -> float | None:
    return None if x is None else float(x)
