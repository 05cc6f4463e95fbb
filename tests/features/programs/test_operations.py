"""What the solver is told of a graph: who reads what, what may run low, and why not; and its cut."""

import itertools
import math
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from auditor.capture.capture import capture
from auditor.execution.policy import plain
from auditor.features.programs.exported import ExportedModel, export_model
from auditor.features.programs.graphs import (
    OperationRefused,
    Operations,
    Trial,
    cuts_of,
    kept_of,
    lower_operations,
    memory_needed,
)
from auditor.features.programs.operations import Table, Value, align_nodes, owner_of, table_of
from auditor.numerics.metrics import output_error
from auditor.plan.context import PlanningContext
from auditor.plan.search import choose
from auditor.records import MemoryUse
from auditor.records.paths import FP32_OUTPUT
from tests.features.programs.conftest import drawn, made
from tests.support.planning import planning_of
from tests.support.replaying import Model, linear
from tests.support.small_models import narrowing
from tests.support.subjects import normal, seeded, subject_of


def wholly(table: Table, *names: str) -> frozenset[str]:
    """Operations, and the rounding of their outputs."""
    return frozenset[str]().union(*map(table.whole, names))


def test_what_is_unsafe_is_kept_and_the_products_are_not(planning: PlanningContext, table: Table) -> None:
    kept = {operation.op: operation.kept for operation in table.operations.values() if operation.kept}
    assert " overflows (" in kept["aten.pow.Tensor_Scalar"]
    products = [table.whole(name) for name in ("linear", "linear_1")]
    assert not any(table.operations[name].kept for name in frozenset().union(*products))
    for some in products:
        product, output = (table.operations[name] for name in sorted(some))
        assert product.flops == planning.costs[product.captured].flops > 0
        assert output.error == planning.contributions["fp16"][product.captured].own ** 2
        assert product.low < product.high
        assert (product.error, output.flops) == (0.0, 0)
    assert table.low_flops(frozenset(("linear", "linear_1"))) == 1.0


def test_what_was_not_run_is_kept() -> None:
    """The code squares in FP32: no patched model overflows there, but an exported program that lowers it would."""
    model = Model(
        lambda m, x: m.layer(x / (1000 * x.float()).square().mean(-1, keepdim=True)), layer=linear(4, 4)
    ).eval()
    planning = planning_of(model, 1 + normal(5, 4).abs(), formats=("fp16",))
    table = table_of(export_model(model, planning.subject.batches[0]).graph_module.graph, "fp16", planning)
    kept = {operation.op: operation.kept for operation in table.operations.values() if operation.kept}
    assert kept["aten.square.default"] == "untested: only a run can measure its effect on the outputs"


def test_values_know_who_makes_them_and_what_rounding_them_costs(planning: PlanningContext, table: Table) -> None:
    stored = {name for name, value in table.values.items() if value.stored}
    assert stored == {"model_first_weight", "model_first_bias", "model_second_weight", "model_second_bias"}
    known = planning.contributions["fp16"]
    assert table.values["model_first_weight"].error == known["p_first_weight"].cast ** 2 > 0
    assert table.values["x"].error == known["x"].cast ** 2 > 0
    returned = [value for value in table.values.values() if value.returned]
    assert [value.made_by for value in returned] == [f"linear_1{FP32_OUTPUT}", "softmax"]


def odd(m: Any, x: torch.Tensor) -> torch.Tensor:
    """Operations that cannot run low, or give FP32 whatever they read."""
    wide = m.layer(x).double().exp().float()
    return wide * torch.linalg.inv(m.layer.weight).sum() + torch.bincount(x[:, 0].abs().long(), x[:, 1]).mean()


def test_what_cannot_run_low_says_so() -> None:
    model, x = Model(odd, layer=linear(4, 4)).eval(), normal(5, 4)
    planning = planning_of(model, x, formats=("bf16",))
    graph = export_model(model, ((x,), {}))
    table = table_of(graph.graph_module.graph, "bf16", planning)
    said = {operation.op: operation for operation in table.operations.values()}
    assert said["aten.linear.default"].kept == ""
    assert said["aten.linalg_inv.default"].kept
    assert said["aten.linalg_inv.default"].name not in table.free


@pytest.mark.parametrize(("objective", "free"), [("time", False), ("memory", False), ("flops", True)])
def test_what_operations_count_for_is_the_objective(objective: str, free: bool, model: nn.Module) -> None:
    x = torch.randn(4, 16)
    planning = planning_of(model, x, formats=("fp16",), objective=objective)
    table = table_of(export_model(model, ((x,), {})).graph_module.graph, "fp16", planning)
    linear, relu = table.operations["linear"], table.operations["relu"]
    assert linear.low < linear.high
    assert (relu.high - relu.low < 2e-3 * (linear.high - linear.low)) == free


def test_every_operation_of_a_flat_model_is_found(planning: PlanningContext, graph: ExportedModel) -> None:
    nodes, found = planning.capture.nodes, align_nodes(graph.graph_module.graph, planning.capture)
    computing = [node for node in graph.graph_module.graph.nodes if node.op == "call_function"]
    assert [found[node.name] for node in computing] == list(nodes)
    assert all(nodes[found[node.name]].owner == owner_of(node) for node in computing)


def test_a_module_that_is_called_twice_keeps_its_calls_apart() -> None:
    def twice() -> nn.Module:
        return Model(lambda m, x: m.one(m.one(x)), one=nn.Sequential(nn.Linear(8, 8), nn.GELU()))

    model, x = twice().eval(), torch.randn(2, 8)
    graph = export_model(model, ((x,), {})).graph_module
    captured = capture(subject_of(model, x))
    found = align_nodes(graph.graph, captured)
    names = [found[node.name] for node in graph.graph.nodes if node.op == "call_function"]
    assert names == list(captured.nodes)


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
    planning = planning_of(seeded(narrowing), normal(8, 16), formats=("fp16",))
    graph = export_model(planning.subject.model, planning.subject.batches[0])
    table = table_of(graph.graph_module.graph, "fp16", planning)
    low = table.free - wholly(table, *high)
    assert len(low) == 6 - len(wholly(table, *high))
    found = memory_needed(lower_operations(graph, table, low))
    assert found == MemoryUse(weights, activations)
    whole = planning.problem("autocast", "fp16")
    assert whole.memory(whole.resolve(plain("fp32"))) == MemoryUse(4 * (1024 + 256), 4 * (128 + 512 + 512))


def test_casts_stand_where_precisions_meet_once_a_value(graph: ExportedModel, table: Table, model: nn.Module) -> None:
    low, half, full = wholly(table, "linear", "relu", "linear_1"), torch.float16, torch.float32
    module, x = lower_operations(graph, table, low), torch.randn(3, 16)
    casts = [(str(n.args[0]), n.args[1]) for n in module.graph.nodes if n.target is torch.ops.aten.to.dtype]
    assert casts == [("x", half), ("relu", full), ("div_1", half), ("linear_1", full)]
    assert {name: p.dtype for name, p in module.named_parameters()} == dict.fromkeys(
        ("model.first.weight", "model.first.bias", "model.second.weight", "model.second.bias"), half
    )
    assert all(p.dtype is full for p in graph.graph_module.parameters())
    with torch.no_grad():
        wide = torch.relu(nn.functional.linear(x.half(), model.first.weight.half(), model.first.bias.half()))
        size = ((1000 * wide.float()) ** 2).mean(-1, keepdim=True).sqrt() / 1000
        narrow = wide.float() / (size + 0.1)
        scores = nn.functional.linear(narrow.half(), model.second.weight.half(), model.second.bias.half()).float()
        found = module(x)
    assert torch.equal(found["scores"], scores)
    assert torch.equal(found["likely"], scores.softmax(-1))


def test_a_weight_that_something_reads_in_fp32_stays_so(graph: ExportedModel, table: Table) -> None:
    module = lower_operations(graph, table, wholly(table, "linear"))
    assert module.get_parameter("model.first.weight").dtype is torch.float16
    assert module.get_parameter("model.second.weight").dtype is torch.float32


# Choices tried: what a run gives is what the same arithmetic written out gives, and what raises has its name.


def test_the_error_of_a_choice_is_that_of_the_arithmetic_written_out(
    planning: PlanningContext, graph: ExportedModel, table: Table, model: nn.Module
) -> None:
    trial = Trial(graph, planning)
    x, low = planning.subject.batches[0][0][0], wholly(table, "linear")
    first: Any = model.first
    with torch.no_grad():
        product = first.weight.half().float() @ x.half().float().T
        wide = torch.relu((product.T + first.bias.half().float()).half().float())
        size = ((1000 * wide) ** 2).mean(-1, keepdim=True).sqrt() / 1000
        scores = model.second(wide / (size + 0.1))
        expected = [scores, scores.softmax(-1)]
    assert trial.error(table, low) == pytest.approx(output_error(planning.reference(((x,), {})), expected), rel=0.05)
    assert trial.error(table, frozenset()) < 1e-6


def test_what_raises_in_a_run_has_its_name(planning: PlanningContext, graph: ExportedModel, table: Table) -> None:
    operation = table.operations["linear"]
    broken = replace(operation, literals=None, reads=("x",))
    odd = replace(table, operations={**table.operations, "linear": broken}, values={**table.values})
    values = {name: value for name, value in odd.values.items() if name != "model_first_weight"}
    with pytest.raises(OperationRefused) as caught:
        Trial(graph, planning).error(replace(odd, format="bf16", values=values), wholly(odd, "linear"))
    assert caught.value.name == "linear"


def test_batches_that_the_graph_answers_otherwise_are_left_out(planning: PlanningContext, graph: ExportedModel) -> None:
    good = planning.subject.batches[0]
    odd = ((torch.randn(4, 17),), {})
    trial = Trial(graph, planning)
    assert trial.agrees(good)
    planning.noise.outputs[id(odd)] = planning.reference(good)
    assert not trial.agrees(odd)
    del planning.noise.outputs[id(odd)]


# The cut: no choice of precisions is cheaper, by enumeration.


def low_at(table: Table, multiplier: float) -> frozenset[str]:
    """What is low at the cut."""
    return table.free.difference(cuts_of(table).best(multiplier))


def under(table: Table, low: frozenset[str], multiplier: float) -> float:
    """What a cut minimizes."""
    price, square = table.price(low)
    return price + multiplier * square


@pytest.mark.parametrize("seed", range(6))
def test_no_choice_is_cheaper(seed: int) -> None:
    rnd = random.Random(seed)
    for _ in range(6):
        table = drawn(rnd, rnd.randint(2, 7))
        free = sorted(table.free)
        sets = (frozenset(some) for n in range(len(free) + 1) for some in itertools.combinations(free, n))
        choices = [low for low in sets if all(name.removesuffix(FP32_OUTPUT) in low for name in low)]
        for multiplier in (0.0, 0.1, 0.5, 1.0, 3.0, 10.0):
            least = min(under(table, low, multiplier) for low in choices)
            assert under(table, low_at(table, multiplier), multiplier) == pytest.approx(least, abs=1e-9)


def two_readers(cast: float) -> Table:
    """An FP32 value that two operations read, each of which saves 0.4 by running low and returns nothing."""
    operations = {name: made(name, ("input",), 0.6, 1.0) for name in ("left", "right")}
    return Table("fp16", operations, {"input": Value("input", None, cast, 0.01)})


def test_a_cast_that_two_read_is_paid_once() -> None:
    table, both = two_readers(cast=0.6), frozenset({"left", "right"})
    assert low_at(table, 0.0) == both
    assert table.price(both) == pytest.approx((2 * 0.6 + 0.6, 0.01))
    assert low_at(two_readers(cast=0.9), 0.0) == frozenset()


def test_less_error_leaves_fewer_of_many_operations_low() -> None:
    space = Operations(chain(*(10.0 ** -(2 + i / 10) for i in range(100))), None)
    sizes = [len(space.table.free - space.propose(allowed).high) for allowed in (1.0, 1e-3, 0.0)]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] == 100 > sizes[1] > sizes[2] == 0


def chain(*errors: float) -> Table:
    """Operations one after the other, each twice as fast low, which adds these squared errors."""
    operations, values = {}, {"value_0": Value("value_0", None, 0.01, 0.0)}
    for index, error in enumerate(errors):
        operations[f"op_{index}"] = made(f"op_{index}", (f"value_{index}",), 0.5, 1.0, error)
        values[f"value_{index + 1}"] = Value(f"value_{index + 1}", f"op_{index}", 0.01, 0.0)
    return Table("fp16", operations, values)


class Runs:
    """Stands for a trial: runs err as predicted; `broken` raises low."""

    def __init__(self, broken: str) -> None:
        self.broken = broken

    def error(self, table: Table, low: frozenset[str]) -> float:
        if self.broken in low:
            raise OperationRefused(self.broken, RuntimeError("there is no kernel"))
        return math.sqrt(table.price(low)[1])


def test_what_raises_is_no_choice() -> None:
    space = Operations(chain(1e-6, 1e-6, 1e-6), Runs("op_1"))
    assert "op_1" in choose(space, 0.01).high
    assert space.log[frozenset()] == math.inf


NO_CHOICE = "no tested plan with this operation in low precision meets the error budget"


def test_every_reason_holds() -> None:
    rnd, kinds = random.Random(3), set()
    for _ in range(30):
        table = drawn(rnd, 6)
        space = Operations(table, None)
        low = table.free - space.propose(0.3).high
        for kept in kept_of(table, low, 0.3):
            kinds.add(kept.kind)
            if kept.kind == "unsafe":
                assert kept.because == table.operations[kept.name].kept != ""
                continue
            whole = table.whole(kept.name) & table.free
            (now, had), (then, has) = table.price(low), table.price(low | whole)
            if kept.kind == "no-gain":
                assert then >= now - 1e-12
                continue
            assert then < now
            numbers = f"from {math.sqrt(had):.2g} to {math.sqrt(has):.2g}"
            assert kept.because == NO_CHOICE if math.sqrt(has) <= 0.3 else numbers in kept.because
    assert kinds == {"unsafe", "no-gain", "budget"}
