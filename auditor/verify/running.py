"""Runs patched models for outputs, scores and times, in the verification process and in the audit's own."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from ..capture.source import raised_at
from ..emulation.emulate import emulate_unless_native
from ..errors import AuditorError, describe, first_line, let_through, out_of_memory
from ..isolation import isolate
from ..isolation.members import modules_of
from ..isolation.process import Flags, ieee, reseed, under
from ..isolation.run_model import copy_batch, run_model
from ..isolation.tensors import memory
from ..numerics.devices import is_gpu, is_native, type_of
from ..numerics.entries import tensors_in
from ..records import Batch, TimeAndMemory, Times
from ..score import NoScore, ScoreFunction, ScoreResult, call_scoring, find_function

T = TypeVar("T")

Call = Callable[..., Any]
Number = Callable[[], float]

Load = Callable[[str], AbstractContextManager[nn.Module]]
"""Load(plan): a context manager that provides the model under the plan of that name."""

FP32, TODAY = "fp32", "fp32_today"
"""Names that stand for the FP32 model without a plan; TODAY: under the caller's own torch flags."""

WARM_UP = 3
"""Untimed warm-up forwards: they load kernels, reserve memory and build caches."""

FEWEST, MOST = 7, 50
"""Minimum and maximum number of timed forwards; SECONDS determines the number."""

SECONDS = 2.0
"""Seconds that the timed forwards should take in total; their number is from FEWEST to MOST."""

PATIENCE = 30.0
"""Seconds after which the warm-up ends early."""

NO_MEMORY = "out of memory"

NOT_RUN = "not run, "
"""Prefix of failure messages without relation to precision: a timeout, a file error, or the end of the process."""


def failure_of(error: BaseException) -> str:
    """An exception in one line, with the source line of the model that raised it."""
    message = first_line(error)[:300] if isinstance(error, AuditorError) else describe(error, 300)
    place = raised_at(error)
    message += f" ({place})" if place else ""
    if out_of_memory(error):
        return f"{NO_MEMORY}, {message}"
    return NOT_RUN + message if isinstance(error, OSError | ImportError) else message


def says_nothing(failure: str | None) -> bool:
    """Whether a plan's failure message says nothing about precision."""
    return failure is not None and (failure.startswith(NOT_RUN) or said_no_memory(failure))


def said_no_memory(failure: str) -> bool:
    """Whether a plan's failure message says that memory ran out."""
    return NO_MEMORY in failure


@dataclass(frozen=True)
class Answers:
    """The outputs of a patched model, on the CPU: a list of tensors for each batch. graded: outputs of another run on
    the first batch, outside `torch.no_grad()`; None if not requested, or if that run raised the exception `ungraded`."""

    outputs: list[list[torch.Tensor]]
    graded: list[torch.Tensor] | None = None
    ungraded: str | None = None


@dataclass(frozen=True)
class ModelRuns:
    """Runs the models that `load` provides, natively or emulating a GPU on a CPU; all state is restored.

    gradients: whether to run with gradients too. most: maximum number of operations of a forward, see `emulate`. apart:
    whether the process exists only for these runs. fused: whether outputs without gradients are those of PyTorch's fused
    transformer path. Each method answers a question (see Question); a failed run returns
    a one-line reason.
    """

    load: Load
    batches: Sequence[Batch] = ()
    device: str = "cpu"
    seed: int = 0
    gradients: bool = False
    most: int | None = None
    apart: bool = False
    fused: bool = False

    def answers(self, plan: str) -> Answers | str:
        """The model's outputs on each batch without gradients and, on the first, with gradients enabled.

        On a native device the model must also run with PyTorch's fused transformer path, which users of the model get; a
        CPU's fused path differs from a GPU's.
        """

        def run(model: nn.Module) -> Answers | str:
            outputs = run_patched(model, self.batches, self.device, self.seed, self.most, fused=self.fused)
            if is_native(self.device) and not self.fused:
                run_model(model, self.batches[0], seed=self.seed, fused=True)
            if not self.gradients:
                return Answers(outputs)
            around = partial(emulate_unless_native, self.device, self.most)
            try:
                graded = run_model(model, self.batches[0], seed=self.seed, around=around, gradients=True)
            except Exception as error:
                let_through(error, memory=False)
                return Answers(outputs, ungraded=failure_of(error))
            return Answers(outputs, [x.cpu() for x in graded])

        return self._run_or_reason(plan, ieee(), run)

    def score(
        self, plan: str, scoring: ScoreFunction | str, most: int | None = None, limit: float | None = None
    ) -> ScoreResult | str:
        """The user's score of the model. most: maximum number of values to read. limit: seconds allowed; code that
        neither calls the model nor yields a number is not stopped.
        """
        around = nullcontext if plan == FP32 else partial(emulate_unless_native, self.device)

        try:
            function = find_function(scoring, seed=self.seed) if isinstance(scoring, str) else scoring
        except Exception as error:
            return failure_of(error)
        run = partial(call_scoring, function, seed=self.seed, around=around, most=most, limit=limit, plan=plan)
        return self._run_or_reason(plan, nullcontext(), run)

    def generate(self, plan: str, compare: Callable[..., Any]) -> dict[str, list[torch.Tensor]] | str:
        """The results of `compare(model, around=...)`, which decodes prompts; as text, why the run failed."""
        around = partial(emulate_unless_native, self.device)
        return self._run_or_reason(plan, ieee(), lambda model: compare(model, around=around))

    def time(self, plan: str, flags: Flags, threads: int, only_eager: bool = False) -> TimeAndMemory | str:
        """Time and memory of one forward on the first batch; for TODAY under the caller's flags. only_eager: whether
        memory and compiled times are left out."""
        torch.set_num_threads(threads)
        around = under(flags) if plan == TODAY else ieee()
        batch = self.batches[0]
        if only_eager:
            return self._run_or_reason(
                plan,
                around,
                lambda model: TimeAndMemory(Forward(model, batch, self.device, self.seed).time_eager(model)),
            )
        run = partial(time_forward, batch=batch, device=self.device, seed=self.seed, apart=self.apart)
        return self._run_or_reason(plan, around, run)

    def natively(self, plan: str, trains: bool = False) -> str:
        """The model's exception in one line on this CPU without emulation, "" if it runs. trains: whether to run it with
        gradients too, which costs as much again."""

        def run(model: nn.Module) -> str:
            run_model(model, self.batches[0], seed=self.seed)
            if not trains:
                return ""
            try:
                run_model(model, self.batches[0], seed=self.seed, gradients=True)
            except Exception as error:
                let_through(error, memory=False)
                return f"with gradients enabled, {failure_of(error)}"
            return ""

        return self._run_or_reason(plan, ieee(), run)

    def run_or_reason(self, plan: str, run: Callable[[nn.Module], T]) -> T | str:
        """The result of `run` on the model under a plan, with FP32 in IEEE arithmetic; as text, why it failed."""
        return self._run_or_reason(plan, ieee(), run)

    def _run_or_reason(self, plan: str, around: AbstractContextManager[None], run: Callable[[nn.Module], T]) -> T | str:
        try:
            with around, self.load(plan) as model:
                return run(model)
        except NoScore as error:
            return str(error)
        except Exception as error:
            let_through(error, memory=False)
            return failure_of(error)


Question = Callable[[ModelRuns, str], Any]
"""A method of Runs, or a `partial` of a method, that another process calls for each plan."""


def run_patched(
    model: nn.Module,
    batches: Sequence[Batch],
    device: str,
    seed: int = 0,
    most: int | None = None,
    *,
    fused: bool = False,
) -> list[list[torch.Tensor]]:
    """Output tensors, on the CPU, of a model to which a plan was applied; one list per batch.

    Raises: the exceptions that the model raises, or would raise on a GPU.
    """
    around = partial(emulate_unless_native, device, most)
    run = partial(run_model, model, seed=seed, around=around, fused=fused)
    return [[x.cpu() for x in run(batch)] for batch in batches]


@dataclass(frozen=True)
class Forward:
    """Runs one forward of a model on a batch, always from the same state and random numbers."""

    model: nn.Module
    batch: Batch
    device: str
    seed: int

    def run(self, call: Call, measure: Callable[[str], AbstractContextManager[Number]]) -> float:
        """Run one forward with `call` in place of the model and no operations intercepted; returns the measurement."""
        with isolate(self.model, self.batch, seed=self.seed):
            args, kwargs = copy_batch(self.batch)
            with torch.no_grad(), _disable_current_modes(), measure(self.device) as result:
                call(*args, **kwargs)
        return result()

    def time_eager(self, call: Call) -> Times:
        """Times in seconds of one forward: median and quartiles over repeats, after warm-up."""
        begun = time.monotonic()
        for _ in range(WARM_UP):
            last = self.run(call, clock)
            if time.monotonic() - begun > PATIENCE:
                break
        wanted = min(MOST, max(FEWEST, round(SECONDS / max(last, 1e-9))))
        result = [self.run(call, clock) for _ in range(wanted)]
        low, median, high = statistics.quantiles(result, n=4, method="inclusive")
        return Times(median, low, high, wanted)

    def time_compiled(self) -> Times:
        """Times of one forward with torch.compile."""
        try:
            return self.time_eager(torch.compile(self.model, dynamic=False))
        finally:
            torch.compiler.reset()

    def time_cuda_graph(self) -> Times:
        """The times of replaying a CUDA graph of the forward; its inputs have fixed addresses."""
        graph = torch.cuda.CUDAGraph()
        args, kwargs = copy_batch(self.batch)
        reseed(self.seed)
        with torch.no_grad(), torch.cuda.graph(graph):
            self.model(*args, **kwargs)
        return self.time_eager(lambda *args, **kwargs: graph.replay())

    def measure_memory(self) -> int:
        """Bytes of the model and its inputs, plus the allocator's peak during a forward."""
        peak_of_run = int(self.run(self.model, peak))
        tensors = tensors_in(copy_batch(self.batch))
        for module in modules_of(self.model):
            stored = (*module._parameters.values(), *module._buffers.values())
            tensors += [x for x in stored if x is not None]
        storages = {storage._cdata: storage.nbytes() for x in tensors for storage in memory(x)}
        return peak_of_run + sum(storages.values())


def time_forward(model: nn.Module, batch: Batch, device: str, *, seed: int = 0, apart: bool = True) -> TimeAndMemory:
    """Time one forward: eager, compiled, and on CUDA as a graph; a variant that fails has a reason instead.

    apart: whether this process exists only for these runs. If not, only the eager variant and memory are measured,
    since compiling changes the process. The model is restored.
    """
    forward = Forward(model, batch, device, seed)
    ways: dict[str, Callable[[], Any]] = {"eager": lambda: forward.time_eager(model), "memory": forward.measure_memory}
    missing = {"compiled": "the model was given as an object, and compiling it would change the caller's process"}
    if apart:
        ways, missing = {**ways, "compiled": forward.time_compiled}, {}
        if device.startswith("cuda"):
            ways["cuda_graph"] = forward.time_cuda_graph
    result: dict[str, Any] = {}
    with isolate(model, batch):
        try:
            run_model(model, batch, seed=seed)  # raises if the model cannot run; its writes are undone
        except Exception as error:
            let_through(error, memory=False)
            return TimeAndMemory(missing=dict.fromkeys(("eager", "compiled", "memory"), failure_of(error)))
        for name, measure in ways.items():
            try:
                result[name] = measure()
            except Exception as error:
                let_through(error, memory=False)
                missing[name] = failure_of(error)
    return TimeAndMemory(**result, missing=missing)


@contextmanager
def clock(device: str) -> Iterator[Number]:
    """Time the `with` block. After the block, the yielded function returns the seconds. The device's queue is drained
    before and after the block."""
    module = torch.get_device_module(type_of(device)) if is_gpu(device) else torch.cpu
    module.synchronize(device)
    begun = time.perf_counter()
    yield lambda: ended - begun
    module.synchronize(device)
    ended = time.perf_counter()


def peak(device: str) -> AbstractContextManager[Number]:
    """Watch memory in a `with` block. After the block, the yielded function returns the peak increase in bytes."""
    return _of_a_gpu(device) if is_gpu(device) else _of_the_cpu()


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
    """Measure peak memory with torch's profiler, which sees every allocation; its lines on stderr are suppressed."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        with torch.autograd.profiler.profile(use_kineto=False, profile_memory=True) as profiler:
            yield lambda: max(accumulate(changes), default=0)
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
    results: Any = profiler.kineto_results
    events = [event for event in results.events() if event.name() == "[memory]"]
    changes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]


def compare_times(found: TimeAndMemory, fp32: TimeAndMemory) -> TimeAndMemory:
    """`found`, with the speedup over FP32 of each way to run, and the memory as a share of FP32's."""
    changed: dict[str, Any] = {}
    for way in ("eager", "compiled", "cuda_graph"):
        times, whole = getattr(found, way), getattr(fp32, way)
        if times is not None and whole is not None:
            low, high = whole.low / times.high, whole.high / times.low
            changed[way] = replace(times, speedup=whole.median / times.median, speedup_low=low, speedup_high=high)
    if found.memory is not None and fp32.memory:
        changed["memory_share"] = found.memory / fp32.memory
    return replace(found, **changed)
