"""Time and peak memory of a model as its user runs it: nothing is imitated, and nothing is intercepted while it is timed."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from ..devices import is_native, type_of
from ..isolation import isolated
from ..isolation.answer import answer, copied
from ..isolation.members import modules_of
from ..isolation.process import reseed
from ..isolation.tensors import memory
from ..raised import let_through
from ..records import Batch, Timed, Times
from ..trees import tensors_in
from .failures import failure_of

WARM_UP = 3
"""Forwards before those that are timed: kernels are looked up, memory is reserved, what is built on first use is built."""

FEWEST, MOST = 7, 50
"""Forwards that are timed; how many of them, `SECONDS` says."""

SECONDS = 2.0
"""What the timed forwards take together, where the fewest do not take longer."""

PATIENCE = 30.0
"""Seconds of warm-up, building apart, after which a model that slow is warm."""

Call = Callable[..., Any]
Number = Callable[[], float]


@dataclass(frozen=True)
class Forward:
    """One forward of a model on a batch, from the same state and random numbers every time."""

    model: nn.Module
    batch: Batch
    device: str
    seed: int

    def run(self, call: Call, measure: Callable[[str], AbstractContextManager[Number]]) -> float:
        """One forward with `call` in the model's place, nothing intercepting operations; what measured it."""
        with isolated(self.model, self.batch, seed=self.seed):
            args, kwargs = copied(self.batch)
            with torch.no_grad(), _disable_current_modes(), measure(self.device) as found:
                call(*args, **kwargs)
        return found()

    def times(self, call: Call) -> Times:
        """Median and quartiles over repeats, after those that warm up."""
        begun = time.monotonic()
        for _ in range(WARM_UP):
            last = self.run(call, clock)
            if time.monotonic() - begun > PATIENCE:
                break
        wanted = min(MOST, max(FEWEST, round(SECONDS / max(last, 1e-9))))
        found = [self.run(call, clock) for _ in range(wanted)]
        low, median, high = statistics.quantiles(found, n=4, method="inclusive")
        return Times(median, low, high, wanted)

    def compiled(self) -> Times:
        """The same, compiled."""
        try:
            return self.times(torch.compile(self.model, dynamic=False))
        finally:
            torch.compiler.reset()

    def graphed(self) -> Times:
        """The same of a CUDA graph of the forward, replayed; the inputs that it reads stay where they are."""
        graph = torch.cuda.CUDAGraph()
        args, kwargs = copied(self.batch)
        reseed(self.seed)
        with torch.no_grad(), torch.cuda.graph(graph):
            self.model(*args, **kwargs)
        return self.times(lambda *args, **kwargs: graph.replay())

    def memory(self) -> int:
        """Bytes: what the model and its inputs hold, and the most that the allocator gives out beyond in a forward."""
        most = int(self.run(self.model, peak))
        held = [x for m in modules_of(self.model) for x in (*m._parameters.values(), *m._buffers.values())]
        held += tensors_in(copied(self.batch))
        storages = {s._cdata: s.nbytes() for x in held if x is not None for s in memory(x)}
        return most + sum(storages.values())


def timed(model: nn.Module, batch: Batch, device: str, *, seed: int = 0, apart: bool = True) -> Timed:
    """What one forward takes, run as it is, compiled, and on CUDA as a graph; what cannot be run so is missing, with why.

    apart: whether this process is for that alone: compiling leaves traces in it, so elsewhere the model is only run as it
    is. The model comes back as it was.
    """
    forward = Forward(model, batch, device, seed)
    ways: dict[str, Callable[[], Any]] = {"eager": lambda: forward.times(model), "memory": forward.memory}
    missing = {"compiled": "the model was handed over as an object: compiling it would leave traces in its process"}
    if apart:
        ways, missing = {**ways, "compiled": forward.compiled}, {}
        if device.startswith("cuda"):
            ways["cuda_graph"] = forward.graphed
    found: dict[str, Any] = {}
    with isolated(model, batch):
        try:
            answer(model, batch, seed=seed)  # whose writes are seen, and undone
        except Exception as error:
            let_through(error, memory=False)
            return Timed(missing=dict.fromkeys(("eager", "compiled", "memory"), failure_of(error)))
        for name, measure in ways.items():
            try:
                found[name] = measure()
            except Exception as error:
                let_through(error, memory=False)
                missing[name] = failure_of(error)
    return Timed(**found, missing=missing)


@contextmanager
def clock(device: str) -> Iterator[Number]:
    """Call the answer after the body for the seconds that it took on the device, its queue empty before and after."""
    module = torch.get_device_module(type_of(device)) if is_native(device) else torch.cpu
    module.synchronize(device)
    begun = time.perf_counter()
    yield lambda: ended - begun
    module.synchronize(device)
    ended = time.perf_counter()


def peak(device: str) -> AbstractContextManager[Number]:
    """Call the answer after the body for the most bytes that torch's allocator gave out in it at one time."""
    return _of_a_gpu(device) if is_native(device) else _of_the_cpu()


@contextmanager
def _of_a_gpu(device: str) -> Iterator[Number]:
    module = torch.get_device_module(type_of(device))
    module.synchronize(device)
    module.reset_peak_memory_stats(device)
    before = module.max_memory_allocated(device)
    yield lambda: most - before
    module.synchronize(device)
    most = int(module.max_memory_allocated(device))


@contextmanager
def _of_the_cpu() -> Iterator[Number]:
    """From torch's profiler, which is told of every allocation; it writes two lines to stderr, and is kept from that."""
    with _silent():
        profiler = torch.autograd.profiler.profile(use_kineto=False, profile_memory=True)
        with profiler:
            yield lambda: max(accumulate(changes), default=0)
    results: Any = profiler.kineto_results
    events = [event for event in results.events() if event.name() == "[memory]"]
    changes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]


@contextmanager
def _silent() -> Iterator[None]:
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
