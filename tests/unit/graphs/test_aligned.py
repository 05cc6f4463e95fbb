"""Exported operations found again among the recorded ones, module by module."""

from __future__ import annotations

import torch
from torch import nn

from auditor.capture.capture import capture
from auditor.graphs.exported import Exported, exported
from auditor.graphs.operations import aligned, owner_of
from auditor.plan.workbench import Workbench
from tests.support.subjects import subject_of


def test_every_operation_of_a_flat_model_is_found(bench: Workbench, graph: Exported) -> None:
    nodes, found = bench.capture.nodes, aligned(graph.graph_module.graph, bench.capture)
    computing = [node for node in graph.graph_module.graph.nodes if node.op == "call_function"]
    assert [found[node.name] for node in computing] == list(nodes)
    assert all(nodes[found[node.name]].owner == owner_of(node) for node in computing)


def test_a_module_that_is_called_twice_keeps_its_calls_apart() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Sequential(nn.Linear(8, 8), nn.GELU())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.one(self.one(x))
            return y

    model, x = Twice().eval(), torch.randn(2, 8)
    graph = exported(model, ((x,), {})).graph_module
    captured = capture(subject_of(model, x))
    found = aligned(graph.graph, captured)
    names = [found[node.name] for node in graph.graph.nodes if node.op == "call_function"]
    assert names == list(captured.nodes)
