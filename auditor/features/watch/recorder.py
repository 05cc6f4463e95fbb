"""The flight recorder: watches a user's training, and saves the step that goes wrong. It never changes the training."""

from __future__ import annotations

import hashlib
import inspect
import logging
import math
import os
import platform
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import partial, wraps
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from torch import nn
from torch.utils import _pytree as pytree

from . import capsule as files
from .capsule import About, Call, Capsule, Code, local
from .generators import is_on_gpu, own_generators, restore, state_of_process, states_of
from .signals import HISTORY, Judge, Signal, Trigger
from .variables import Variables
from .weights import FrozenFiles, bare, plain_name, state_of_model

logger = logging.getLogger("auditor.watch")

MOST = 3
"""Default number of capsules that a recorder writes."""
EVERY, FIRST = 25, 5
"""Updates between samples of lost updates and flushed gradients, and the first one that is sampled."""
SAMPLED, ENTRIES = 4, 1 << 14
"""Number of parameters that are sampled, the largest ones, and of entries of each."""
SIDE = 128
"""Number of rows and of columns of a gradient that are sampled."""
CALLS = 64
"""Largest number of calls of the step that are kept if no update ends them."""
SUBNORMAL = 2.0**-14
"""FP16 values below this are subnormal."""
FLUSHES = 0.05
"""Share of the non-zero gradients that are subnormal in FP16, from which zeros count as underflow."""

Function = TypeVar("Function", bound=Callable[..., Any])

_inert: list[Recorder] | None = None
"""During a replay, the recorders that the user's file has created, which do nothing."""


@contextmanager
def inert_recorders() -> Iterator[list[Recorder]]:
    """In the `with` block, recorders do nothing; gives those that are created, for the replay to know their objects."""
    global _inert
    before, _inert = _inert, []
    try:
        yield _inert
    finally:
        _inert = before


@dataclass
class _Called:
    """A call of the step, or of the model, that may be saved. tensors: those of the batch, and their versions at its
    start. variables: see `Variables`. inputs: of the model, if the random numbers of its forward pass are to be recorded."""

    batch: Any
    tensors: list[torch.Tensor]
    versions: list[int]
    generators: dict[str, Any]
    variables: dict[str, Any]
    inputs: list[Any] = field(default_factory=list)

    def written(self) -> list[int]:
        """Numbers of the batch's tensors that were written to since the call began."""
        pairs = zip(self.tensors, self.versions, strict=True)
        return [i for i, (x, version) in enumerate(pairs) if _version(x) != version]


@dataclass
class _Sample:
    """A sampled update. before: (entries of a weight, a copy, whether the gradient is not zero) before the update."""

    before: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


class Recorder:
    """Watches training, see `watch`. capsules: paths of the capsules that were written."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Any],
        scalers: Sequence[Any],
        folder: Path,
        keep: int,
        log: Callable[..., Any] | None,
        most: int,
        frozen: Any,
        draws: bool | None,
    ) -> None:
        self.model = bare(model)
        self.models = [bare(one) for one in model] if isinstance(model, Several) else [self.model]
        self.optimizers = [_inner(one) for one in optimizers]
        self.scalers = list(scalers)
        self.folder = folder
        self.capsules: list[Path] = []
        self._log = log
        self._most = most
        self._frozen = FrozenFiles(frozen)
        self._is_plain = not any(_is_sharded(p) for p in self.model.parameters())
        self._keeps_inputs = _is_on_gpu(self.model) if draws is None else draws
        self._code: Code | None = None
        self._function: Callable[..., Any] | None = None
        self._own: dict[str, Any] | None = None
        self._variables = Variables(None, nn.Module())
        self._ring: deque[list[_Called]] = deque(maxlen=max(keep - 1, 0))
        self._seen: set[str] = set()
        self._judges = [Judge() for _ in self.optimizers]
        self._signals: deque[Signal] = deque(maxlen=HISTORY)
        self._buffers = _Buffers(self.model)
        self._reused: set[int] = set()  # numbers of the batch's tensors that are written during a step
        self._handles: list[Any] = []
        self._undo: list[Callable[[], None]] = []
        self._is_off = False
        self._is_step = False  # whether the user's step is decorated, or begins with `begin`
        self._depth = 0  # of calls of the decorated step
        self.number = 0
        self._sample: dict[int, _Sample] = {}
        self._shares: dict[int, list[tuple[str, torch.Tensor, torch.Tensor]]] = {}  # of the last sample, not read yet
        self._count = [0] * len(self.optimizers)  # updates
        self._new_group()

    def _new_group(self) -> None:
        """Begin to collect the calls that belong to the next update."""
        self._calls: list[_Called] = []
        self._roots: list[torch.Tensor] = []  # losses of the backward passes since the last update
        self._returned: list[torch.Tensor] = []  # losses of calls without an update
        self._updated: list[int] = []
        self._autocast: dict[str, str] = {}
        self._scaled: tuple[Any, Any] | None = None  # the last scaled loss, and the loss itself

    # What the user calls.

    def step(self, function: Function) -> Function:
        """Watch a function that runs one training step; use it as a decorator."""
        if self._is_off:
            return function
        self._is_step = True
        self._function = inspect.unwrap(function)
        self._code = _code_of(self._function)

        @wraps(function)
        def watched(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or self._is_off or self._depth:
                return function(*args, **kwargs)
            self._guard(self._begin, (args, kwargs))
            self._depth += 1
            try:
                value = function(*args, **kwargs)
            except Exception as error:
                self._guard(self._raised, error)
                raise
            finally:
                self._depth -= 1
            self._guard(self._end, value)
            return value

        return watched  # type: ignore[return-value]

    def begin(self, *args: Any, **kwargs: Any) -> None:
        """Tell the batch of a step that begins, in a loop whose step is not a function of its own: call it before the
        forward pass. The step ends with its update."""
        self._is_step = True
        if not self._is_off:
            self._guard(self._begin, (args, kwargs))

    def save(self, reason: str = "asked for") -> Path | None:
        """Write a capsule of the present step; returns its path, None if that failed."""
        if not self._is_off:
            self._guard(self._write, Trigger("asked", reason), None)
        return self.capsules[-1] if self.capsules else None

    def close(self) -> None:
        """End watching: remove all hooks."""
        self._is_off = True
        for handle in self._handles:
            handle.remove()
        for undo in self._undo:
            undo()
        self._handles.clear()
        self._undo.clear()
        self._new_group()
        self._ring.clear()

    def __reduce__(self) -> Any:
        return _Absent, ()

    # Hooks.

    def attach(self) -> None:
        """Hook into the model, the optimizers, the scalers and `backward`."""
        for model in self.models:
            self._handles.append(model.register_forward_pre_hook(self._forward, with_kwargs=True))
            if not _is_compiled(model):
                for child in model.children():  # accelerate opens its autocast region inside the model's forward
                    self._handles.append(child.register_forward_pre_hook(self._inside))
        for number, optimizer in enumerate(self.optimizers):
            self._handles.append(optimizer.register_step_pre_hook(_Hook(self, "_before", number)))
            self._handles.append(optimizer.register_step_post_hook(_Hook(self, "_after", number)))
        for scaler in self.scalers:
            self._wrap_scaler(scaler)
        _Backward.recorders.add(self)
        _Backward.install()
        self._undo.append(lambda: _Backward.remove(self))

    def _wrap_scaler(self, scaler: Any) -> None:
        """Wrap `scale`, to know the loss itself, and `step`, to know whether it calls the optimizer."""
        scale, step = scaler.scale, scaler.step

        @wraps(scale)
        def watched_scale(outputs: Any) -> Any:
            result = scale(outputs)
            if isinstance(outputs, torch.Tensor):
                self._scaled = result, outputs
            return result

        @wraps(step)
        def watched_step(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            numbers = [i for i, one in enumerate(self.optimizers) if one is _inner(optimizer)]
            before = [self._count[i] for i in numbers]
            result = step(optimizer, *args, **kwargs)
            for i, count in zip(numbers, before, strict=True):
                if self._count[i] == count and not self._is_off:
                    self._guard(self._skipped, i)
            return result

        scaler.scale, scaler.step = watched_scale, watched_step
        self._undo.append(lambda: _unwrap(scaler, "scale", "step"))

    def _guard(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function of this recorder; an exception ends the recording, and the training goes on."""
        try:
            with torch.no_grad():
                return function(*args)
        except Exception as error:
            with suppress(Exception):
                logger.warning("stops watching, since it failed (%s: %s)", type(error).__name__, error)
                self.close()
            self._is_off = True
            return None

    def _forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling() or self._is_off or not (module.training and torch.is_grad_enabled()):
            return
        self._guard(self._on_forward, module, args, kwargs)

    def _on_forward(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        if not self._is_step:
            self._begin((args, kwargs))
        self._autocast = self._autocast or _autocast()
        if self._calls and self._keeps_inputs:
            self._calls[-1].inputs.append((model, args, kwargs))

    def _inside(self, module: nn.Module, args: Any) -> None:
        if not torch.compiler.is_compiling() and self._calls and not self._autocast:
            self._autocast = _autocast()

    def heard_backward(self, roots: Any) -> None:
        """A backward pass begins at these tensors."""
        if self._is_off:
            return
        several = roots if isinstance(roots, list | tuple) else [roots]
        for root in several:
            if isinstance(root, torch.Tensor) and root.numel() == 1:
                loss = self._scaled[1] if self._scaled is not None and self._scaled[0] is root else root
                self._roots.append(loss.detach())
        self._scaled = None

    # The course of a step.

    def _begin(self, batch: Any) -> None:
        """Before a call of the step: note the batch, the generators, and the buffers before the first call."""
        if self._updated and not self._depth:
            self._finish_group()
        if not self._calls:
            self._buffers.save()
        if self._own is None:
            self._own = own_generators(self._function, self.model)
            self._variables = Variables(self._function, self.model)
        tensors = _tensors(batch)
        if self._reused:
            batch = _cloned(batch, self._reused)
            tensors = _tensors(batch)
        generators = state_of_process()
        generators["own"] = states_of(self._own)
        versions = [_version(x) for x in tensors]
        self._calls.append(_Called(batch, tensors, versions, generators, self._variables.values()))
        del self._calls[:-CALLS]

    def _end(self, value: Any) -> None:
        """After a call of the decorated step."""
        if self._updated:
            self._finish_group()
            return
        for x in pytree.tree_leaves(value):
            if isinstance(x, torch.Tensor) and x.numel() == 1 and x.is_floating_point():
                self._returned.append(x.detach())

    def _raised(self, error: Exception) -> None:
        """The step raised an exception: the user's own check of the loss, for example."""
        text = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        self._write(Trigger("raised", f"the step raised {text}"), None, error=text)
        self._new_group()

    def _finish_group(self) -> None:
        for call in self._calls:
            self._reused.update(call.written())
        self._buffers.note_changes()
        for call in self._calls:
            call.generators = {}
        self._ring.append(self._calls)
        self._new_group()
        self.number += 1

    def _before(self, number: int, optimizer: Any) -> None:
        """Before an update, with the weights as they were: read the signals, with one synchronization, and judge."""
        count = self._count[number]
        is_sampled = count % EVERY == FIRST
        gradients = _gradients(optimizer, self._is_plain)
        factor = getattr(optimizer, "grad_scale", None)  # of a fused optimizer, which unscales itself
        skips = getattr(optimizer, "found_inf", None)
        values: list[tuple[str, torch.Tensor]] = []
        if gradients:
            norm = _norm([g for _, g in gradients])
            if factor is not None:
                norm = norm / factor.to(norm.device)
            values.append(("norm", norm))
        values += [("loss", x) for x in self._roots]
        values += [("returned", x) for x in self._returned]
        if skips is not None:
            values.append(("skips", skips))
        scale = self._scale(number)
        if scale is not None:
            values.append(("scale", scale))
        if is_sampled and gradients:
            self._sample[number] = _sample(gradients)
            flushed, total = _flushed(gradients, scale if factor is None else None)
            self._shares.setdefault(number, []).append(("flushed", flushed, total))
        shares = self._shares.pop(number, [])
        for name, part, whole in shares:
            values += [(f"{name} part", part), (f"{name} whole", whole)]
        numbers = _read(values)
        loss = sum(numbers["loss"]) if "loss" in numbers else None
        if not all(math.isfinite(x) for x in numbers.get("returned", ())):
            loss = math.nan
        read_norm = _first(numbers, "norm")
        if read_norm is not None and math.isinf(read_norm) and all(_is_finite(g) for _, g in gradients):
            read_norm = None  # only the norm overflows
        parts = {name: numbers[f"{name} part"][0] / max(numbers[f"{name} whole"][0], 1.0) for name, _, _ in shares}
        self._hear(
            Signal(
                self.number,
                number,
                loss,
                read_norm,
                _first(numbers, "scale"),
                _rate(optimizer),
                bool(_first(numbers, "skips")),
                parts.get("lost"),
                parts.get("flushed"),
            )
        )

    def _after(self, number: int, optimizer: Any) -> None:
        """After an update: compare the sampled weights with those before it. They are read at the next update."""
        sample = self._sample.pop(number, None)
        if sample is not None and sample.before:
            lost = torch.stack([((now == was) & moved).sum() for now, was, moved in sample.before]).sum()
            whole = torch.stack([moved.sum() for *_, moved in sample.before]).sum()
            self._shares.setdefault(number, []).append(("lost", lost, whole))
        self._count[number] += 1
        self._end_update(number)

    def _skipped(self, number: int) -> None:
        """A GradScaler did not call the optimizer: the weights are as they were."""
        values = [("loss", x) for x in self._roots]
        scale = self._scale(number)
        if scale is not None:
            values.append(("scale", scale))
        numbers = _read(values)
        loss = sum(numbers["loss"]) if "loss" in numbers else None
        rate = _rate(self.optimizers[number])
        self._hear(Signal(self.number, number, loss, None, _first(numbers, "scale"), rate, True))
        self._end_update(number)

    def _end_update(self, number: int) -> None:
        """After an update, or a skipped one."""
        self._updated.append(number)
        self._roots.clear()
        self._returned.clear()
        if not self._is_step:
            self._finish_group()

    def _hear(self, signal: Signal) -> None:
        """Judge a signal, log it, and write a capsule if there is a reason."""
        triggers = self._judges[signal.optimizer].judge(signal)
        self._signals.append(signal)
        if self._log is not None:
            named = {"loss": signal.loss, "grad_norm": signal.norm, "scale": signal.scale, "lr": signal.rate}
            named |= {
                "skipped": float(signal.skipped),
                "updates_lost": signal.lost,
                "gradients_flushed": signal.flushed,
            }
            self._log({f"auditor/{name}": x for name, x in named.items() if x is not None}, signal.step)
        new = [one for one in triggers if one.kind not in self._seen]
        if new:  # one capsule of a step, which names all that was seen
            self._write(Trigger(new[0].kind, "; ".join(one.text for one in new)), signal)

    # The capsule.

    def _write(self, trigger: Trigger, signal: Signal | None, error: str = "") -> None:
        """Write a capsule, unless there is one of this kind already."""
        if trigger.kind in self._seen or len(self.capsules) >= self._most:
            return
        self._seen.add(trigger.kind)
        rank, world = _rank()
        try:
            capsule = self._capsule(trigger, signal, rank, world, error)
            name = f"step-{self.number:06d}-{trigger.kind}" + (f"-rank{rank}" if world > 1 else "")
            path = files.write(capsule, self.folder, name)
        except Exception as failure:
            said = f"{type(failure).__name__}: {failure}"
            logger.warning("step %d: %s; no capsule could be written (%s)", self.number, trigger.text, said)
            return
        self.capsules.append(path)
        logger.warning("step %d: %s; capsule in %s", self.number, trigger.text, path)

    def _capsule(self, trigger: Trigger, signal: Signal | None, rank: int, world: int, error: str) -> Capsule:
        weights, frozen, sharded = state_of_model(self.model, self._frozen)
        keeps_state = trigger.kind in ("updates-lost", "asked")
        changed = [number for call in self._calls for number in call.written()]
        about = About(
            kind=trigger.kind,
            text=trigger.text,
            step=self.number,
            rank=rank,
            world=world,
            updated=tuple(self._updated),
            scale=signal.scale if signal else _number(self._scale(0)),
            loss=signal.loss if signal else None,
            norm=signal.norm if signal else None,
            scalers=tuple(one.state_dict() for one in self.scalers),
            optimizers=tuple(type(one).__name__ for one in self.optimizers),
            groups=tuple(_groups(one) for one in self.optimizers),
            autocast=dict(self._autocast),
            is_whole_step=self._is_step,
            is_training=self.model.training,
            evaluated=tuple(plain_name(path) for path, one in self.model.named_modules() if not one.training),
            trained=tuple(plain_name(name) for name, p in self.model.named_parameters() if p.requires_grad),
            changed=tuple(dict.fromkeys(changed)),
            sharded=sharded,
            code=self._code,
            update=_line_of_update(),
            error=error,
            versions=_versions(),
            flags=_flags(),
            command=tuple(sys.argv),
            signals=tuple(asdict(one) for one in self._signals),
        )
        saved = tuple(Call(one.batch, one.generators, tuple(self._drawn(one)), one.variables) for one in self._calls)
        states = tuple(_state_of(one) if keeps_state else None for one in self.optimizers)
        buffers = self._buffers.before()
        previous = tuple([one.batch for one in calls if not one.written()] for calls in self._ring)
        return Capsule(about, weights, buffers, frozen, states, saved, previous)

    def _drawn(self, call: _Called) -> list[Any]:
        """The random numbers of a call's forward passes, which run again without gradients, in the same state.

        A sharded model is not run again, since that would communicate.
        """
        if not call.inputs or any(_is_sharded(p) for p in self.model.parameters()):
            return []
        from .draws import RecordDraws  # imports more of the auditor, which a training without a trigger need not

        here = state_of_process()
        live = [(x, x.clone()) for x in self.model.buffers()]
        recorded = RecordDraws()
        try:
            self._buffers.put_back()
            _restore_all(call.generators)
            regions = [torch.autocast(device, getattr(torch, dtype)) for device, dtype in self._autocast.items()]
            for region in regions:
                region.__enter__()  # type: ignore[no-untyped-call]
            try:
                for model, args, kwargs in call.inputs:
                    with recorded:
                        model.forward(*args, **kwargs)
            finally:
                for region in reversed(regions):
                    region.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        except Exception as error:  # such as too little memory
            logger.warning("random numbers of the forward pass were not recorded (%s)", error)
            return []
        finally:
            _restore_all(here)
            for x, value in live:
                x.copy_(value)
        return recorded.draws

    def _scale(self, number: int) -> torch.Tensor | None:
        """The loss scale of an optimizer's scaler; None without one."""
        scales = [one._scale for one in self.scalers if getattr(one, "_scale", None) is not None]
        if not scales:
            return None
        return scales[number] if len(scales) == len(self.optimizers) else scales[0]


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
    if not optimizers or not all(hasattr(_inner(one), "register_step_pre_hook") for one in optimizers):
        raise TypeError("auditor.watch needs an optimizer of torch, or a list of optimizers")
    if scaler is None:  # accelerate's optimizers know theirs
        scaler = [one for one in {id(x): getattr(x, "scaler", None) for x in optimizers}.values() if one is not None]
    scalers = [one for one in _several(scaler) if getattr(one, "_enabled", True)]
    recorder = Recorder(model, optimizers, scalers, Path(folder), keep, log, most, frozen, draws)
    if _inert is not None:
        recorder._is_off = True
        recorder.scalers = _several(scaler)
        _inert.append(recorder)
        return recorder
    recorder._guard(files.remove_drafts, recorder.folder)
    recorder._guard(recorder.attach)
    return recorder


class Several(nn.ModuleList):
    """Several modules that are trained together."""


class _Absent:
    """What a pickled recorder becomes: hooks that do nothing."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: None

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        return None


class _Hook:
    """A hook of an optimizer, which a pickled optimizer loses."""

    def __init__(self, recorder: Recorder, method: str, number: int) -> None:
        self._recorder, self._method, self._number = recorder, method, number

    def __call__(self, optimizer: Any, args: Any, kwargs: Any) -> Any:
        """Before or after `step`. A closure computes the gradients inside `step`: the signals are read after it."""
        recorder = self._recorder
        if recorder._is_off:
            return None
        heard = partial(recorder._guard, getattr(recorder, self._method), self._number, optimizer)
        if self._method == "_before" and any(map(callable, (*args, *kwargs.values()))):
            after_closure = partial(_followed_by, heard)
            given = tuple(after_closure(x) if callable(x) else x for x in args)
            named = {name: after_closure(x) if callable(x) else x for name, x in kwargs.items()}
            return given, named
        heard()
        return None

    def __reduce__(self) -> Any:
        return _Absent, ()


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


class _Backward:
    """Tells recorders of every `backward`. torch looks up `torch.autograd.backward` at each call, so that replacing it
    once is enough."""

    recorders: ClassVar[weakref.WeakSet[Recorder]] = weakref.WeakSet()
    original: ClassVar[Callable[..., None] | None] = None

    @classmethod
    def install(cls) -> None:
        """Wrap `torch.autograd.backward`, once in a process."""
        if cls.original is not None:
            return
        original = cls.original = torch.autograd.backward

        @wraps(original)
        def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
            if not torch.compiler.is_compiling():
                for recorder in list(cls.recorders):
                    recorder._guard(recorder.heard_backward, tensors)
            original(tensors, *args, **kwargs)

        torch.autograd.backward = backward

    @classmethod
    def remove(cls, recorder: Recorder) -> None:
        """Remove a recorder, and with the last one the wrapper."""
        cls.recorders.discard(recorder)
        if not cls.recorders and cls.original is not None:
            torch.autograd.backward = cls.original
            cls.original = None


class _Buffers:
    """Copies of the buffers that steps change, as they were before the step."""

    def __init__(self, model: nn.Module) -> None:
        self._places = [
            (f"{path}.{name}".lstrip("."), module, name)
            for path, module in model.named_modules(remove_duplicate=True)
            for name in module._buffers
        ]
        self._still: dict[str, tuple[int, int]] = {}  # {name: (id, version)} of buffers that no step has changed
        self._saved: dict[str, torch.Tensor] = {}
        self._is_first = True

    def _now(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, module, key in self._places:
            buffer = module._buffers.get(key)
            if buffer is not None:
                yield name, local(buffer)

    def save(self) -> None:
        """Before a step: copy the buffers that steps change, before the first step all of them."""
        for name, buffer in self._now():
            saved = self._saved.get(name)
            if saved is not None and saved.shape == buffer.shape and saved.dtype == buffer.dtype:
                saved.copy_(buffer)
            elif saved is not None or self._still.get(name) != (id(buffer), buffer._version):
                self._saved[name] = buffer.detach().clone()
                self._still[name] = id(buffer), buffer._version

    def note_changes(self) -> None:
        """After the first step: drop the copies of buffers that it did not change."""
        if not self._is_first:
            return
        self._is_first = False
        for name, buffer in self._now():
            if self._still.get(name) == (id(buffer), buffer._version):
                self._saved.pop(name, None)

    def before(self) -> dict[str, torch.Tensor]:
        """All buffers, as before the step."""
        return {name: self._saved.get(name, buffer).detach().cpu().clone() for name, buffer in self._now()}

    def put_back(self) -> None:
        """Set the buffers to their values before the step."""
        for name, buffer in self._now():
            if name in self._saved:
                buffer.copy_(self._saved[name])


def _several(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


def _inner(optimizer: Any) -> Any:
    """The optimizer of torch inside a wrapper, such as accelerate's or Lightning's."""
    while isinstance(vars(optimizer).get("optimizer", vars(optimizer).get("_optimizer")), torch.optim.Optimizer):
        optimizer = vars(optimizer).get("optimizer", vars(optimizer).get("_optimizer"))
    return optimizer


def _is_compiled(model: nn.Module) -> bool:
    return hasattr(model, "_orig_mod") or getattr(model, "_compiled_call_impl", None) is not None


def _unwrap(holder: Any, *names: str) -> None:
    for name in names:
        vars(holder).pop(name, None)


def _autocast() -> dict[str, str]:
    """{device: dtype} of the autocast regions that are open."""
    devices = ("cpu", "cuda")
    return {one: str(torch.get_autocast_dtype(one)).split(".")[-1] for one in devices if torch.is_autocast_enabled(one)}


def _tensors(batch: Any) -> list[torch.Tensor]:
    """The tensors of a batch, in a fixed order; also in the attributes of a user's own object."""
    found: list[torch.Tensor] = []
    for leaf in pytree.tree_leaves(batch):
        if isinstance(leaf, torch.Tensor):
            found.append(leaf)
        elif hasattr(leaf, "__dict__") and not callable(leaf):
            found += [x for x in vars(leaf).values() if isinstance(x, torch.Tensor)]
    return found


def _cloned(batch: Any, numbers: set[int]) -> Any:
    """The batch, with copies of the tensors that a step writes to."""
    position = iter(range(1 << 30))
    return pytree.tree_map_only(torch.Tensor, lambda x: x.clone() if next(position) in numbers else x, batch)


def _version(x: torch.Tensor) -> int:
    return 0 if x.is_inference() else x._version


def _gradients(optimizer: Any, is_plain: bool) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(parameter, gradient) of an optimizer: of sharded ones this rank's parts, of sparse ones the stored entries.
    is_plain: whether no parameter is sharded."""
    pairs = [(p, g) for group in optimizer.param_groups for p in group["params"] if (g := p.grad) is not None]
    if is_plain and all(g.layout is torch.strided for _, g in pairs):
        return pairs
    result = []
    for p, gradient in pairs:
        part = local(gradient).detach()
        result.append((local(p).detach(), part._values() if part.layout is torch.sparse_coo else part))
    return result


def _norm(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """The L2 norm of all entries together, in FP32, on the device of the first gradient; NaN and Inf stay."""
    device = gradients[0].device
    groups: dict[Any, list[torch.Tensor]] = {}
    for gradient in gradients:
        groups.setdefault((gradient.device, gradient.dtype), []).append(gradient)
    norms: list[torch.Tensor] = []
    for (_, dtype), members in groups.items():
        is_half = dtype in (torch.float16, torch.bfloat16)
        norms += torch._foreach_norm(members, 2, dtype=torch.float32) if is_half else torch._foreach_norm(members, 2)
    if len(groups) > 1 or norms[0].dtype is not torch.float32:
        norms = [x.to(device, torch.float32) for x in norms]
    return torch.linalg.vector_norm(torch.stack(norms))


def _read(values: list[tuple[str, torch.Tensor]]) -> dict[str, list[float]]:
    """The values by name, with one synchronization for all that are on a GPU."""
    if not values:
        return {}
    device = next((x.device for _, x in values if x.device.type != "cpu"), None)
    if device is None:
        numbers = [float(x) for _, x in values]
    else:
        on_gpu = [x.detach().reshape(()).to(device, torch.float64, non_blocking=True) for _, x in values]
        numbers = torch.stack(on_gpu).tolist()
    result: dict[str, list[float]] = {}
    for (name, _), value in zip(values, numbers, strict=True):
        result.setdefault(name, []).append(value)
    return result


def _is_finite(x: torch.Tensor) -> bool:
    return bool(torch.isfinite(x).all())


def _sample(gradients: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> _Sample:
    """Some entries of the largest parameters, with copies of them."""
    largest = sorted((pair for pair in gradients if pair[0].shape == pair[1].shape), key=lambda one: -one[0].numel())
    before = []
    for p, gradient in largest[:SAMPLED]:
        if p.is_contiguous() and gradient.is_contiguous():
            entries = _spread(p)
            before.append((entries, entries.clone(), _spread(gradient) != 0))
    return _Sample(before)


def _spread(x: torch.Tensor) -> torch.Tensor:
    """At most ENTRIES entries of a contiguous tensor, evenly spaced, as a view."""
    flat = x.view(-1)
    return flat[:: max(flat.numel() // ENTRIES, 1)]


def _flushed(
    gradients: Sequence[tuple[torch.Tensor, torch.Tensor]], scale: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(number of gradients that underflowed to zero, number of all) in the sampled parameters.

    Rows and columns of zeros alone do not count, since tokens that a batch lacks and units that are off give them. Zeros
    count as underflow if enough of the other entries are subnormal in FP16 at the loss scale, or if all are zero.
    """
    device = gradients[0][1].device
    zeros = torch.zeros((), device=device, dtype=torch.float32)
    whole = torch.zeros((), device=device, dtype=torch.float32)
    every = torch.ones((), device=device, dtype=torch.bool)
    smallest = torch.full((), SUBNORMAL, device=device) / (1.0 if scale is None else scale.to(device))
    for _, gradient in sorted(gradients, key=lambda one: -one[1].numel())[:SAMPLED]:
        matrix = gradient.reshape(gradient.shape[0] if gradient.dim() > 1 else 1, -1)
        matrix = matrix[:: max(matrix.shape[0] // SIDE, 1), :: max(matrix.shape[1] // SIDE, 1)]  # [rows, columns]
        is_set = matrix != 0
        every = every & ~is_set.any().to(device)
        counts = is_set.any(dim=1, keepdim=True) & is_set.any(dim=0, keepdim=True)
        is_tiny = is_set & (matrix.abs() < smallest.to(matrix.device))
        number = is_set.sum()
        underflows = is_tiny.sum() > FLUSHES * number
        zeros += ((~is_set & counts).sum() * underflows).to(device)
        whole += counts.sum().to(device)
    everything = torch.ones((), device=device)
    return torch.where(every, everything, zeros), torch.where(every, everything, whole)


def _rate(optimizer: Any) -> float | None:
    """The largest learning rate, if it is known without a synchronization."""
    rates = [group.get("lr") for group in optimizer.param_groups]
    known = [float(x) for x in rates if isinstance(x, int | float) or (torch.is_tensor(x) and x.device.type == "cpu")]
    return max(known, default=None) if not any(math.isnan(x) for x in known) else math.nan


def _number(x: torch.Tensor | None) -> float | None:
    return None if x is None else float(x)


def _first(numbers: dict[str, list[float]], name: str) -> float | None:
    return numbers[name][0] if name in numbers else None


def _groups(optimizer: Any) -> list[dict[str, Any]]:
    """The parameter groups without parameters: rates as they are at this step."""
    plain = (bool, int, float, str, type(None), tuple, list)
    result = []
    for group in optimizer.param_groups:
        given = {key: float(x) if torch.is_tensor(x) and x.numel() == 1 else x for key, x in group.items()}
        result.append({key: x for key, x in given.items() if key != "params" and isinstance(x, plain)})
    return result


def _state_of(optimizer: Any) -> dict[str, Any]:
    """The optimizer's state by the numbers of its parameters; of sharded ones this rank's parts."""
    numbers: Iterable[Any] = (p for group in optimizer.param_groups for p in group["params"])
    return {str(i): dict(optimizer.state[p]) for i, p in enumerate(numbers) if p in optimizer.state}


def _is_on_gpu(model: nn.Module) -> bool:
    """Whether the model draws its random numbers on a GPU: a CPU repeats its own from the states of its generators, but
    not those of a GPU."""
    return next((p.device.type for p in model.parameters()), "cpu") != "cpu"


def _is_sharded(p: Any) -> bool:
    return callable(getattr(p, "to_local", None))


def _restore_all(state: dict[str, Any]) -> None:
    restore(state)
    if "cuda" in state:
        torch.cuda.set_rng_state_all(state["cuda"])


def _rank() -> tuple[int, int]:
    """This process's rank and the number of processes."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return 0, 1


def _code_of(function: Any) -> Code | None:
    """Where a function is written; None for one without a file."""
    try:
        file = inspect.getsourcefile(function) or ""
        text = Path(file).read_bytes()
        return Code(str(Path(file).resolve()), function.__qualname__, function.__code__.co_firstlineno, digest(text))
    except (OSError, TypeError, AttributeError):
        return None


def digest(text: bytes) -> str:
    """The SHA-256 of a file's text."""
    return hashlib.sha256(text).hexdigest()


def _line_of_update() -> str:
    """The innermost line outside torch, this package and installed packages that is running."""
    torch_folder = str(Path(torch.__file__).parent)
    own_folder = str(Path(__file__).parents[2])
    frame: Any = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        is_foreign = file.startswith((torch_folder, own_folder, "<")) or "site-packages" in file
        if not is_foreign:
            return f"{Path(file).name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def _versions() -> dict[str, str]:
    from ... import __version__

    device = torch.cuda.get_device_name() if is_on_gpu() else "cpu"
    return {
        "auditor": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cuda": str(torch.version.cuda),
        "device": device,
        "system": platform.platform(),
    }


def _flags() -> dict[str, Any]:
    """torch's precision flags, see isolation/process.py."""
    from ...isolation.process import flags

    return flags()
