"""Whether a model's answer depends on the calls before it, in words."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from ..dispatch import uncompiled, unfused
from ..errors import MeasureError, first_line
from ..formats.metrics import output_error
from ..raised import let_through
from ..records import Batch
from ..runs.answer import copied
from ..runs.outputs import tensor_outputs
from ..state import unchanged
from ..state.draws import reseed

AGREEMENT = 1e-6
"""Relative L2 difference up to which two answers are one: a kernel may take another path on other memory."""

_HANDLING = "every run of the audit starts from the state that the model was handed over in."


def history_matters(model: nn.Module, batch: Batch, answer: Sequence[torch.Tensor], seed: int) -> str | None:
    """What a second call does otherwise, from the state that a first one left and with the same random numbers.

    The caller has just run the model and puts its state back. answer: what that run returned. A cache that is filled
    once makes no difference; counters, statistics, memories and caches that grow do.
    """
    try:
        with unchanged(nn.Module(), batch):
            reseed(seed)
            args, kwargs = copied(batch)
            with unfused(), uncompiled():
                again = [x.detach() for x in tensor_outputs(model(*args, **kwargs))]
            error = output_error(answer, again)
    except MeasureError:
        return (
            f"The model keeps state between calls: a second one on the same inputs answers in other shapes; {_HANDLING}"
        )
    except Exception as problem:
        let_through(problem)
        return (
            "The model keeps state between calls: a second one on the same inputs fails "
            f"({type(problem).__name__}: {first_line(problem)[:160]}); {_HANDLING}"
        )
    if error <= AGREEMENT:
        return None
    return f"The model keeps state between calls: a second one on the same inputs differs by {error:.2g}; {_HANDLING}"
