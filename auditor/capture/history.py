"""Whether a model's answer depends on the calls before it, in words."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from ..errors import MeasureError, first_line
from ..isolation import isolated
from ..isolation.answer import copied
from ..isolation.eager import uncompiled, unfused
from ..isolation.outputs import tensor_outputs
from ..numerics.metrics import output_error
from ..raised import let_through
from ..records import Batch

AGREEMENT = 1e-6
"""Relative L2 difference up to which two answers are one: a kernel may take another path on other memory."""

_HANDLING = (
    "every run of the audit starts with the parameters, buffers and attributes that the model was handed over with; what "
    "closures, globals, caches and iterators keep is not put back."
)


def history_matters(model: nn.Module, batch: Batch, answer: Sequence[torch.Tensor], seed: int) -> str | None:
    """What a later call does otherwise, from the state that earlier ones left and with the same random numbers.

    The caller has just run the model and puts its state back. answer: what that run returned. One call on other values
    comes between: attention over the same keys twice is what it is over them once. A cache that is filled once makes no
    difference; counters, statistics, memories and caches that grow do.
    """
    other, calls = tree_map_only(torch.Tensor, _rolled, batch), "a second one on the same inputs"
    if any(x is not y for x, y in zip(tree_leaves(batch), tree_leaves(other), strict=True)):
        calls = "one on the same inputs, after one on others,"
        try:
            _called(model, other, batch, seed)
        except Exception as problem:  # these values need not be any that the model takes
            let_through(problem)
            calls = "one on the same inputs, after one on others that fails,"
    try:
        error = output_error(answer, _called(model, batch, batch, seed))
    except MeasureError:
        return f"The model keeps state between calls: {calls} answers in other shapes; {_HANDLING}"
    except Exception as problem:
        let_through(problem)
        return (
            f"The model keeps state between calls: {calls} fails "
            f"({type(problem).__name__}: {first_line(problem)[:160]}); {_HANDLING}"
        )
    if error <= AGREEMENT:
        return None
    return (
        f"The model keeps state between calls: {calls} differs by {error:.2g} (relative L2; integers by the share that "
        f"changed, if that is more); {_HANDLING}"
    )


def _rolled(x: torch.Tensor) -> torch.Tensor:
    """Floating values in other places; indices and masks as they are."""
    moved = x.is_floating_point() and x.layout is torch.strided and not x.is_nested and x.dim() > 0
    return x.detach().roll(1, -1) if moved else x


def _called(model: nn.Module, batch: Batch, holder: Batch, seed: int) -> list[torch.Tensor]:
    """One more call, which leaves its traces in the model and none in what is handed to it."""
    with isolated(holder, seed=seed), unfused(), uncompiled():
        args, kwargs = copied(batch)
        return [x.detach().clone() for x in tensor_outputs(model(*args, **kwargs))]
