"""PyTorch's fused transformer path, which a user's run without gradients takes and an audit leaves closed: where it answers otherwise."""

from __future__ import annotations

import warnings

import torch
from torch import nn

from ..errors import MeasureError
from ..formats.entries import entries, is_number
from ..formats.metrics import output_error
from ..isolation.answer import answer
from ..isolation.outputs import NamedTensors
from ..raised import let_through
from ..records import Batch

_WITH_PATH = (nn.TransformerEncoderLayer, nn.MultiheadAttention)

_ALIKE = 1e-4
"""Error up to which two runs in FP32 answer the same: their kernels sum in different orders."""


def otherwise(model: nn.Module, batch: Batch, audited: NamedTensors) -> str | None:
    """A sentence where the fused path answers NaN or something else than what is audited; None where it does not, or is closed."""
    if not torch.backends.mha.get_fastpath_enabled() or not any(isinstance(m, _WITH_PATH) for m in model.modules()):
        return None
    fused = _answered(model, batch, fused=True)
    if fused is None or (apart := _apart(audited, fused)) <= _ALIKE:
        return None
    again = _answered(model, batch, fused=False)
    if again is None or not _apart(audited, again) <= _ALIKE:  # it answers otherwise whichever path it takes
        return None
    nan = any(bool(entries(x).isnan().any()) for x in fused if is_number(x))
    what = "returns NaN there" if nan else f"answers otherwise there, by {apart:.2g} of what is audited"
    return (
        f"Run without gradients, the model takes PyTorch's fused transformer path and {what}: the audit leaves that path closed, as "
        "torch.backends.mha.set_fastpath_enabled(False) does."
    )


def _answered(model: nn.Module, batch: Batch, fused: bool) -> NamedTensors | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # this path works with nested tensors, of which torch warns
            return answer(model, batch, fused=fused)
    except (Exception, SystemExit) as error:
        let_through(error, memory=False)
        return None


def _apart(audited: NamedTensors, found: NamedTensors) -> float:
    """How far apart, infinitely where one has NaN or another form."""
    try:
        apart = output_error(list(audited), list(found))
    except (MeasureError, RuntimeError):
        return float("inf")
    return apart if apart == apart else float("inf")
