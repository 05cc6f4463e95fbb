"""Collectives are measured as they run: waited for before their result is read."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from auditor.measure.measure import measure
from tests.support.capturing import Function, captured


class Recorded(TorchDispatchMode):
    """The operations that run, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def reduced(x: Tensor) -> Tensor:
    return functional.all_reduce(x + 1.0, "sum", dist.group.WORLD)


def test_a_collective_is_waited_for_before_its_result_is_read() -> None:
    model, inputs = Function(reduced).eval(), (torch.full((2, 4), 3.0),)
    traced = captured(model, *inputs).capture
    with Recorded() as recorded:
        found = measure(traced, model, (inputs, {}), ("fp16", "bf16"))
    (name,) = (name for name, node in traced.nodes.items() if node.op.startswith("_c10d_functional.all_reduce"))
    assert found.ranges[name].max_abs == 4.0  # of one rank, 3 + 1
    after = {second for first, second in pairwise(recorded.names) if first == "_c10d_functional.all_reduce.default"}
    assert after == {"_c10d_functional.wait_tensor.default"}
