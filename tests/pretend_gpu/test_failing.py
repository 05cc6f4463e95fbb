"""A GPU that gives up in the middle of an audit: one line, wherever that is, and never a verdict of an operation."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import auditor
from auditor.errors import AuditorError
from tests.pretend_gpu.limits import counted
from tests.pretend_gpu.memory import ALLOCATOR
from tests.pretend_gpu.natively import natively
from tests.support.subjects import normal, seeded

SAID = "CUDA error: device-side assert triggered"


@pytest.mark.parametrize("share", [0.002, 0.4, 0.95])
@natively
def test_it_ends_in_one_line(share: float) -> None:
    model, inputs = seeded(lambda: nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2))).eval(), (normal(3, 4),)
    found: list[int] = []
    with counted(found):
        auditor.audit(model, inputs, device="pretend", formats="fp16", strategies="autocast")
    last, take = ALLOCATOR.taken + int(share * found[0]), ALLOCATOR.take

    def failing(size: int, index: int) -> object:
        if ALLOCATOR.taken >= last:  # and from here on: nothing runs on it any more
            raise torch.AcceleratorError(SAID)
        return take(size, index)

    ALLOCATOR.take = failing  # type: ignore[assignment,method-assign]
    try:
        with pytest.raises(AuditorError, match=SAID) as caught:
            auditor.audit(model, inputs, device="pretend", formats="fp16", strategies="autocast")
    finally:
        del ALLOCATOR.take
    assert caught.value.slug in ("device-failed", "no-copy") and "\n" not in str(caught.value)
    assert all(x.device.type == "cpu" for x in model.parameters())
