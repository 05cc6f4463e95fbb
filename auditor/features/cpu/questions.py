"""Questions about a plan on a CPU, which the verification process or the audit's own process answers."""

from __future__ import annotations

import ctypes
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from ...isolation import isolate
from ...isolation.outputs import tensor_outputs
from ...isolation.run_model import copy_batch, run_model
from ...numerics.cpus import isa_in, kernels_in
from ...verify.running import ModelRuns

Executed = tuple[str, dict[str, int]]
"""What oneDNN says of one forward: its instructions, "" if it names none, and {kernel: number of calls}."""


def executed(runs: ModelRuns, plan: str) -> Executed | str:
    """The kernels of oneDNN that one forward on the first batch calls; as text, why the run failed."""

    def run(model: nn.Module) -> Executed:
        with verbose_lines() as read:
            run_model(model, runs.batches[0], seed=runs.seed, fused=runs.fused)
        lines = read()
        _said_isa.extend(filter(None, [isa_in(lines)]))
        return next(iter(_said_isa), ""), dict(kernels_in(lines))

    return runs.run_or_reason(plan, run)


def compiled_outputs(runs: ModelRuns, plan: str) -> list[torch.Tensor] | str:
    """The outputs of the model on the first batch, compiled; as text, why there are none."""
    if not runs.apart:
        return "the model was given as an object, and compiling it would change the caller's process"

    def run(model: nn.Module) -> list[torch.Tensor]:
        batch = runs.batches[0]
        try:
            with isolate(model, batch, seed=runs.seed), torch.no_grad(), _disable_current_modes():
                args, kwargs = copy_batch(batch)
                outputs = tensor_outputs(torch.compile(model, dynamic=False)(*args, **kwargs))
                return [x.detach().clone() for x in outputs]
        finally:
            torch.compiler.reset()

    return runs.run_or_reason(plan, run)


_said_isa: list[str] = []
"""The instructions that oneDNN named in this process, which it does only once."""


@contextmanager
def verbose_lines() -> Iterator[Callable[[], list[str]]]:
    """In the `with` block oneDNN reports its kernels. After the block, the yielded function returns its lines.

    oneDNN writes to the process's standard output, which goes to a file meanwhile.
    """
    reported = list[str]()
    c_library = ctypes.CDLL(None)
    c_library.fflush(None)
    kept = os.dup(1)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 1)
        try:
            on = torch.backends.mkldnn.VERBOSE_ON
            with torch.backends.mkldnn.verbose(on):  # type: ignore[no-untyped-call]
                yield lambda: reported
        finally:
            c_library.fflush(None)
            os.dup2(kept, 1)
            os.close(kept)
        file.seek(0)
        reported += file.read().decode("utf-8", "replace").splitlines()
