"""Runs of the models that plans make, judged alike in the process that verifies and in the audit's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch
from torch import nn

from ..capture.imitation import as_on
from ..devices import is_native
from ..isolation.answer import answer
from ..isolation.process import Flags, ieee, under
from ..raised import let_through
from ..records import Batch, Timed
from ..recursion import deep
from ..score import Given, Scoring, Unscored, given_by
from .failures import failure_of
from .timing import timed

T = TypeVar("T")

Load = Callable[[str], AbstractContextManager[nn.Module]]
"""Gives the model under a plan, by its name, for a body."""

Told = Callable[[str], None]
"""Hears how far the user's function is, in words; "" where it has given nothing so far."""

FP32, TODAY = "fp32", "fp32_today"
"""What the model itself is called among the plans: as it is, and under the flags of the audit's caller."""


@dataclass(frozen=True)
class Answers:
    """What a patched model answers, on the CPU: a list of tensors for each batch.

    graded: for the first batch once more, outside of `torch.no_grad()`; None where that was not asked for.
    """

    outputs: list[list[torch.Tensor]]
    graded: list[torch.Tensor] | None = None


@dataclass(frozen=True)
class Runs:
    """Runs the models that are loaded, natively on a GPU, on a CPU as a GPU would; none leaves a trace.

    gradients: whether the model can be run with them at all. most: operations that a forward may take, see `imitated`.
    What does not run is a one-line reason.
    """

    load: Load
    batches: Sequence[Batch] = ()
    device: str = "cpu"
    seed: int = 0
    gradients: bool = False
    most: int | None = None

    def answers(self, plan: str) -> Answers | str:
        """What the model answers on each batch without gradients and, on the first, with them.

        On a GPU it also has to run where PyTorch's fused transformer path is open, as it is to its user; on a CPU what would
        run there is not what a GPU runs.
        """

        def run(model: nn.Module) -> Answers | str:
            outputs = run_patched(model, self.batches, self.device, self.seed, self.most)
            if is_native(self.device):
                answer(model, self.batches[0], seed=self.seed, fused=True)
            if not self.gradients:
                return Answers(outputs)
            around = partial(as_on, self.device, self.most)
            try:
                graded = answer(model, self.batches[0], seed=self.seed, around=around, gradients=True)
            except Exception as error:
                let_through(error, memory=False)
                return f"with gradients enabled, {failure_of(error)}"
            return Answers(outputs, [x.cpu() for x in graded])

        return self._given(plan, ieee(), run)

    def score(
        self,
        plan: str,
        scoring: Scoring,
        most: int | None = None,
        limit: float | None = None,
        told: Callable[[int], None] = lambda count: None,
    ) -> Given | str:
        """What the user's function gives of the model. most, limit, told: see `given_by`.

        Code that neither calls the model nor gives a number is not ended by `limit`.
        """
        around = nullcontext if plan == FP32 else partial(as_on, self.device)

        def run(model: nn.Module) -> Given:
            return given_by(scoring, model, seed=self.seed, around=around, most=most, limit=limit, told=told)

        return self._given(plan, nullcontext(), run)

    def time(self, plan: str, flags: Flags, apart: bool) -> Timed | str:
        """What one forward takes on the first batch, as TODAY under the caller's flags. apart: see `timed`."""
        around = under(flags) if plan == TODAY else ieee()
        run = partial(timed, batch=self.batches[0], device=self.device, seed=self.seed, apart=apart)
        return self._given(plan, around, run)

    def _given(self, plan: str, around: AbstractContextManager[None], run: Callable[[nn.Module], T]) -> T | str:
        try:
            with deep(), around, self.load(plan) as model:
                return run(model)
        except Unscored as error:
            return str(error)
        except Exception as error:
            let_through(error, memory=False)
            return failure_of(error)


def run_patched(
    model: nn.Module, batches: Sequence[Batch], device: str, seed: int = 0, most: int | None = None
) -> list[list[torch.Tensor]]:
    """Output tensors, on the CPU, of a model that carries its own scopes; one list per batch.

    The model is called as its user calls it. Raises: whatever it raises, or a GPU would raise.
    """
    around = partial(as_on, device, most)
    return [[x.cpu() for x in answer(model, batch, seed=seed, around=around)] for batch in batches]


def counted(plan: str, count: int) -> str:
    """How far the user's function is, in words."""
    return f"{plan.replace('_', ' ')}: {count:,}"
