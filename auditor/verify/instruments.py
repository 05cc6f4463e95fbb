"""Clocks and counters of memory: a GPU's own where there is one, else those of the CPU."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import accumulate
from typing import Any

import torch

from ..devices import has_clock, is_native, type_of


@contextmanager
def clock(device: str) -> Iterator[Callable[[], float]]:
    """Call the answer after the body for the seconds that it took on the device, its queue empty before and after."""
    if not is_native(device):
        begun = time.perf_counter()
        yield lambda: ended - begun
        ended = time.perf_counter()
        return
    module = torch.get_device_module(type_of(device))
    module.synchronize(device)
    if not has_clock(device):
        begun = time.perf_counter()
        yield lambda: ended - begun
        module.synchronize(device)
        ended = time.perf_counter()
        return
    start, end = module.Event(enable_timing=True), module.Event(enable_timing=True)
    start.record()
    yield lambda: float(start.elapsed_time(end)) / 1000
    end.record()
    end.synchronize()


def memory(device: str) -> AbstractContextManager[Callable[[], int]]:
    """Call the answer after the body for the most bytes that torch's allocator gave out in it at one time."""
    return _of_a_gpu(device) if is_native(device) else _of_the_cpu()


@contextmanager
def _of_a_gpu(device: str) -> Iterator[Callable[[], int]]:
    module = torch.get_device_module(type_of(device))
    module.synchronize(device)
    module.reset_peak_memory_stats(device)
    before = module.max_memory_allocated(device)
    yield lambda: most - before
    module.synchronize(device)
    most = int(module.max_memory_allocated(device))


@contextmanager
def _of_the_cpu() -> Iterator[Callable[[], int]]:
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
