"""Runs of a patched model: natively on a GPU; on a CPU as a GPU would run it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from ..devices import is_native
from ..errors import AuditorError, first_line
from ..imitation import as_on
from ..isolation.answer import answer
from ..raised import let_through, out_of_memory
from ..records import Batch

NO_MEMORY = "out of memory"

NOT_RUN = "not run, "
"""How the reason begins why a plan has no answer that says nothing of precision: time, a file, the end of its process."""

Outputs = list[list[torch.Tensor]]


@dataclass(frozen=True)
class Answers:
    """What a patched model answers, on the CPU: a list of tensors for each batch.

    graded: for the first batch once more, outside of `torch.no_grad()`; None where that was not asked for. held: how the
    weights were, as `offloaded` says it; "" where all of them were in memory, or in files mapped into it.
    """

    outputs: Outputs
    graded: list[torch.Tensor] | None = None
    held: str = ""


def run_patched(
    model: nn.Module, batches: Sequence[Batch], device: str, seed: int = 0, most: int | None = None
) -> Outputs:
    """Output tensors, on the CPU, of a model that carries its own scopes; one list per batch.

    The model is called as its user calls it. Raises: whatever it raises, or a GPU would raise.
    """
    around = partial(as_on, device, most)
    return [[x.cpu() for x in answer(model, batch, seed=seed, around=around)] for batch in batches]


def answers_of(
    model: nn.Module,
    batches: Sequence[Batch],
    device: str,
    seed: int = 0,
    gradients: bool = True,
    most: int | None = None,
) -> Answers | str:
    """What a patched model answers without gradients and, on the first batch, with them; or why it has no answer.

    most: operations that a forward may take, see `imitated`. gradients: whether the model can be run with them at all. On a GPU it also has to run where PyTorch's fused
    transformer path is open, as it is to its user; on a CPU what would run there is not what a GPU runs.
    """
    try:
        outputs = run_patched(model, batches, device, seed, most)
        if is_native(device):
            answer(model, batches[0], seed=seed, fused=True)
    except Exception as error:
        let_through(error, memory=False)
        return failure_of(error)
    if not gradients:
        return Answers(outputs)
    try:
        graded = answer(model, batches[0], seed=seed, around=partial(as_on, device, most), gradients=True)
    except Exception as error:
        let_through(error, memory=False)
        return f"with gradients enabled, {failure_of(error)}"
    return Answers(outputs, [x.cpu() for x in graded])


def failure_of(error: BaseException) -> str:
    """What a run raised, in one line, and at which line of the model."""
    from ..tape.source import raised_at  # processes that verify need none of that room otherwise

    name, text = type(error).__name__, first_line(error)
    said = text[:300] if text == name or isinstance(error, AuditorError) else f"{name}: {text[:300]}"
    place = raised_at(error)
    said += f" ({place})" if place else ""
    if out_of_memory(error):
        return f"{NO_MEMORY}, {said}"
    return NOT_RUN + said if isinstance(error, OSError | ImportError) else said


def says_nothing(failure: str | None) -> bool:
    """Whether the reason why a plan was not run has nothing to do with precision."""
    return failure is not None and (failure.startswith(NOT_RUN) or said_no_memory(failure))


def said_no_memory(failure: str) -> bool:
    """Whether memory was what was missing in the process that a plan ran in."""
    return NO_MEMORY in failure
