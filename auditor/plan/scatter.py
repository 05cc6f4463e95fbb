"""Repeats the run of a plan whose outputs are a few numbers at slightly changed weights: their error may be small by chance.

The error of an output of many entries is an average over them. That of one number, such as a loss, is one draw: its sign
and size change with every weight, so that one run in ten shows a tenth of the usual error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from ..isolation import isolate
from ..isolation.weights import change_weights
from ..numerics.entries import is_number
from ..records import Plan
from ..verify.loaders import in_hand
from ..verify.running import FP32, ModelRuns

FEW = 16
"""Outputs of at most this many floating-point numbers, in all batches together, are run again."""
DRAWS = 8
"""Number of these runs; the root mean square of so many draws is within a quarter of the true one in two of three cases."""

Distance = Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], float]


def are_few(outputs: Sequence[Sequence[torch.Tensor]]) -> bool:
    """Whether the outputs of all batches have at most FEW floating-point numbers, but some."""
    return 0 < sum(x.numel() for one in outputs for x in one if is_number(x)) <= FEW


def scattered_error(model: nn.Module, plan: Plan, runs: ModelRuns, distance: Distance) -> float | None:
    """The root mean square of a plan's errors at changed weights; None if a run fails, or an error is not finite.

    runs: the batches and the device of the verification. The model is restored.
    """
    squares = []
    for seed in range(1, DRAWS + 1):
        error = _error_at_changed_weights(model, plan, runs, distance, seed)
        if not math.isfinite(error):
            return None
        squares.append(error**2)
    return math.sqrt(sum(squares) / DRAWS)


def _error_at_changed_weights(model: nn.Module, plan: Plan, runs: ModelRuns, distance: Distance, seed: int) -> float:
    """The largest error of all batches; NaN if a run fails in FP32 or under the plan."""

    @contextmanager
    def load(name: str) -> Iterator[nn.Module]:
        with isolate(model):
            change_weights(model, seed, frozen=True)
            with in_hand(model, {plan.name: plan}, name):
                yield model

    changed = ModelRuns(load, runs.batches, runs.device, runs.seed, most=runs.most)
    reference, low = changed.answers(FP32), changed.answers(plan.name)
    if isinstance(reference, str) or isinstance(low, str):
        return math.nan
    pairs = zip(reference.outputs, low.outputs, strict=True)
    return max(distance(ours, theirs) for ours, theirs in pairs)
