"""Runs of a patched model: natively on a GPU; on a CPU as a GPU would run it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import nn

from ..records import Batch
from ..running import answer, as_on


def run_patched(model: nn.Module, batches: Sequence[Batch], device: str, seed: int = 0) -> list[list[torch.Tensor]]:
    """Output tensors, on the CPU, of a model that carries its own scopes; one list per batch.

    The model is called as its user calls it. Raises: whatever it raises, or a GPU would raise.
    """
    around = partial(as_on, device)
    return [[x.cpu() for x in answer(model, batch, seed=seed, around=around)] for batch in batches]
