"""The graph of a choice: the casts that it takes and no others, weights stored low, and what it then answers."""

from __future__ import annotations

import torch
from torch import fx, nn

from auditor.graphs.choices import lowered
from auditor.graphs.exported import Exported
from auditor.graphs.operations import Table

to = torch.ops.aten.to.dtype


def casts(module: fx.GraphModule) -> list[tuple[str, torch.dtype]]:
    return [(str(n.args[0]), n.args[1]) for n in module.graph.nodes if n.target is to]  # type: ignore[misc]


def test_casts_stand_where_precisions_meet_each_value_once(graph: Exported, table: Table, model: nn.Module) -> None:
    low, half, full = frozenset({"linear", "relu", "linear_1"}), torch.float16, torch.float32
    module, x = lowered(graph, table, low), torch.randn(3, 16)
    assert casts(module) == [("x", half), ("relu", full), ("div_1", half), ("linear_1", full)]
    assert {name: p.dtype for name, p in module.named_parameters()} == dict.fromkeys(
        ("model.first.weight", "model.first.bias", "model.second.weight", "model.second.bias"), half
    )
    assert all(p.dtype is full for p in graph.graph_module.parameters())
    with torch.no_grad():
        wide = torch.relu(nn.functional.linear(x.half(), model.first.weight.half(), model.first.bias.half()))  # type: ignore
        size = ((1000 * wide.float()) ** 2).mean(-1, keepdim=True).sqrt() / 1000
        narrow = wide.float() / (size + 0.1)
        scores = nn.functional.linear(narrow.half(), model.second.weight.half(), model.second.bias.half()).float()  # type: ignore
        found = module(x)
    assert torch.equal(found["scores"], scores)
    assert torch.equal(found["likely"], scores.softmax(-1))


def test_a_weight_that_something_reads_in_fp32_stays_so(graph: Exported, table: Table) -> None:
    module = lowered(graph, table, frozenset({"linear"}))
    assert module.get_parameter("model.first.weight").dtype is torch.float16
    assert module.get_parameter("model.second.weight").dtype is torch.float32
