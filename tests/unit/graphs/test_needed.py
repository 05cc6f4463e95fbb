"""Bytes of a forward of a lowered graph against sums done by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from auditor.graphs.choices import lowered, memory_needed
from auditor.graphs.exported import exported
from auditor.graphs.operations import table_of
from auditor.graphs.stage import memory_in_fp32
from auditor.records import Memory
from tests.support.planning import bench_of


class Chain(nn.Module):
    """x [8, 16] -> [8, 64] -> a view of it -> relu -> [8, 4]."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(16, 64, bias=False), nn.Linear(64, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.narrow(self.wide(x).reshape(8, 64).relu())
        return y


@pytest.mark.parametrize(
    ("high", "weights", "activations"),
    [
        # the caller's input, and at the relu what it reads and what it makes, 8 * 64 each
        ((), 2 * (1024 + 256), 4 * 128 + 2 * (512 + 512)),
        # the FP32 result of the relu beside the low copy of it, once its own low input is gone
        (("linear",), 4 * 1024 + 2 * 256, 4 * 128 + 4 * 512 + 2 * 512),
        (("linear", "reshape", "relu", "linear_1"), 4 * (1024 + 256), 4 * (128 + 512 + 512)),
    ],
)
def test_needed_as_counted_by_hand(high: tuple[str, ...], weights: int, activations: int) -> None:
    torch.manual_seed(0)
    bench = bench_of(Chain(), torch.randn(8, 16), formats=("fp16",))
    graph = exported(bench.subject.model, bench.subject.batches[0])
    table = table_of(graph.graph_module.graph, "fp16", bench)
    low = table.may_be_low() - set(high)
    assert len(low) == 4 - len(high)
    found = memory_needed(lowered(graph, table, low))
    assert found == Memory(weights, activations)
    assert memory_in_fp32(bench) == Memory(4 * (1024 + 256), 4 * (128 + 512 + 512))
