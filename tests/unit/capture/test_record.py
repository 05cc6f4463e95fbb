"""One run written down: what it answers, who runs its operations, what is marked beside them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from auditor.capture.intercept import Handler
from auditor.capture.record import record
from auditor.capture.regions import Region
from tests.support.capturing import Function


class Doubling(Handler):
    """Hands on twice what an addition gave."""

    def __init__(self) -> None:
        self.regions: list[Region] = []

    def whole(self, op: Any, args: Any, kwargs: Any, region: Region) -> Any:
        if op is not torch.ops.aten.add.Tensor:
            return op(*args, **kwargs)
        self.regions.append(region)
        return op(*args, **kwargs) * 2

    part = whole


def test_the_handler_runs_the_operations() -> None:
    handler = Doubling()
    _, (answer,) = record(Function(lambda x: x + 1.0), ((torch.ones(1),), {}), handler=handler)
    assert answer.item() == 4.0  # (1 + 1) * 2
    assert [(region.enabled, region.dtype) for region in handler.regions] == [(True, "float32")]


def test_a_run_of_modules_asks_for_no_dtype_by_itself() -> None:
    recording, _ = record(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), ((torch.ones(1, 2),), {}))
    assert not recording.asked
    assert recording.returned == {"linear": ["0#1"], "relu": ["1#2"]}
