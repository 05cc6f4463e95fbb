"""What the solver is told of a graph: who reads what, what may run low, and why not."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from auditor.graphs.exported import exported
from auditor.graphs.operations import Table, table_of
from auditor.plan.workbench import Workbench
from tests.support.planning import bench_of


def test_what_is_unsafe_is_kept_and_the_products_are_not(bench: Workbench, table: Table) -> None:
    kept = {operation.op: operation.kept for operation in table.operations.values() if operation.kept}
    assert kept["aten.pow.Tensor_Scalar"].startswith("unsafe: overflow")
    products = [each for each in table.operations.values() if each.op == "aten.linear.default"]
    assert len(products) == 2
    assert not any(each.kept for each in products)
    for each in products:
        assert each.captured is not None
        assert each.flops == bench.costs[each.captured].flops > 0
        assert each.error == bench.contributions["fp16"][each.captured].own ** 2
        assert each.low < each.high
    assert table.low_flops(frozenset(each.name for each in products)) == 1.0


def test_values_know_who_makes_them_and_what_rounding_them_costs(bench: Workbench, table: Table) -> None:
    stored = {name for name, value in table.values.items() if value.stored}
    assert stored == {"model_first_weight", "model_first_bias", "model_second_weight", "model_second_bias"}
    known = bench.contributions["fp16"]
    assert table.values["model_first_weight"].error == known["p_first_weight"].cast ** 2 > 0
    assert table.values["x"].error == known["x"].cast ** 2 > 0
    returned = [value for value in table.values.values() if value.returned]
    assert [value.made_by for value in returned] == ["linear_1", "softmax"]


class Odd(nn.Module):
    """Operations that cannot run low, or give FP32 whatever they read."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = self.layer(x).double().exp().float()
        return wide * torch.linalg.inv(self.layer.weight).sum() + torch.bincount(x[:, 0].abs().long(), x[:, 1]).mean()


def test_what_cannot_run_low_says_so() -> None:
    torch.manual_seed(0)
    model, x = Odd().eval(), torch.randn(5, 4)
    bench = bench_of(model, x, formats=("bf16",))
    graph = exported(model, ((x,), {}))
    table = table_of(graph.graph_module.graph, "bf16", bench)
    said = {operation.op: operation for operation in table.operations.values()}
    assert said["aten.linear.default"].kept == ""
    assert said["aten.linalg_inv.default"].kept
    assert said["aten.linalg_inv.default"].name not in table.may_be_low()


@pytest.mark.parametrize(("objective", "free"), [("time", False), ("memory", False), ("flops", True)])
def test_what_operations_count_for_is_the_objective(objective: str, free: bool, model: nn.Module) -> None:
    x = torch.randn(4, 16)
    bench = bench_of(model, x, formats=("fp16",), objective=objective)
    table = table_of(exported(model, ((x,), {})).graph_module.graph, "fp16", bench)
    linear, relu = table.operations["linear"], table.operations["relu"]
    assert linear.low < linear.high
    assert (relu.high - relu.low < 2e-3 * (linear.high - linear.low)) == free
