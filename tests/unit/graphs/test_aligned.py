"""Exported operations found again among the recorded ones, module by module."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils import _pytree as pytree

from auditor.capture.capture import capture
from auditor.graphs.aligned import aligned, owner_of
from auditor.graphs.exported import exported
from auditor.graphs.operations import Seen
from auditor.plan.workbench import Workbench
from tests.subjects import subject_of


def test_every_operation_of_a_flat_model_is_found(bench: Workbench, seen: Seen) -> None:
    nodes = bench.capture.nodes
    computing = [node for node in seen.graph.nodes if node.op == "call_function"]
    assert {seen.captured[node.name] for node in computing} == set(nodes)
    assert [seen.captured[node.name] for node in computing] == list(nodes)
    assert all(nodes[seen.captured[node.name]].owner == owner_of(node) for node in computing)


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
    values = {}

    class Keeping(torch.fx.Interpreter):
        def run_node(self, n: torch.fx.Node) -> object:
            values[n.name] = super().run_node(n)
            return values[n.name]

    Keeping(graph).run(*pytree.tree_leaves((x,)), enable_io_processing=False)
    found = aligned(graph.graph, values, captured)
    assert len(found) == len(set(found.values())) == len(captured.nodes) == 4
