"""The FP32 run under autograd: the model's own answer, and a gradient at every value, each worked out by hand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from auditor.execution.execute import Executor
from auditor.measure.reference import Back, Reference
from tests.support.capturing import Function
from tests.support.subjects import capture_of, seeded


@dataclass
class Found:
    """The run, and every value in it."""

    run: Reference
    kept: dict[str, Any]


def run(model: nn.Module, *inputs: Tensor, back: Back = "trusted") -> Found:
    captured, found = capture_of(model, *inputs), Found(Reference(back), {})
    leaves = [x.detach().requires_grad_(x.is_floating_point()) for x in captured.bind(model, (inputs, {}))]
    for n, value in Executor(captured.graph_module, found.run).steps(*leaves):
        found.kept[n.name] = value
        if isinstance(value, Tensor) and value.requires_grad:
            value.retain_grad()
    return found


def test_every_value_has_the_gradient_of_its_readers() -> None:
    found = run(Function(lambda x: (x * 3.0).square()), torch.tensor([2.0]))
    found.kept["square"].sum().backward()
    assert found.kept["square"].item() == 36.0
    assert found.kept["mul"].grad.item() == 12.0  # d y^2 / dy at 6
    assert found.kept["square"].grad.item() == 1.0


def test_a_value_that_depends_on_no_input_has_a_gradient_too() -> None:
    found = run(Function(lambda x: x * torch.arange(2.0)), torch.tensor([5.0, 7.0]))
    assert len(found.run.anchors) == 1
    found.kept["mul"].sum().backward()
    assert found.kept["arange"].grad.tolist() == [5.0, 7.0]


def test_detached_values_are_followed() -> None:
    # The gradient ends at `detach`, the error does not.
    found = run(Function(lambda x: (x * 2.0).detach() * 3.0), torch.tensor([1.0]))
    found.kept["mul_1"].sum().backward()
    assert found.kept["mul"].grad.item() == 3.0


def test_an_operation_that_returns_its_input_gets_a_gradient_of_its_own() -> None:
    # The cast changes nothing; what it hands on is 5 of the 5 + 7 that the product gets.
    found = run(Function(lambda x: (y := x * 1.0, y.float() * 5.0 + y * 7.0)[1]), torch.tensor([1.0]))
    (cast,) = (name for name in found.kept if name.startswith("to"))
    found.kept["add"].sum().backward()
    assert found.kept[cast].grad.item() == 5.0
    assert found.kept["mul"].grad.item() == 12.0


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = x.tanh()
        return self.a(y) + self.b(y)


def test_products_read_shared_values_under_names_of_their_own() -> None:
    model = seeded(Twice)
    found = run(model, torch.ones(1, 2))
    first, second = found.run.readings["linear"]["tanh"], found.run.readings["linear_1"]["tanh"]
    assert first is not None
    assert second is not None
    first.retain_grad()
    second.retain_grad()
    found.kept["add"].sum().backward()
    # the gradient at each reading is that through its own weight: its column sums
    assert torch.equal(first.grad, model.a.weight.detach().sum(0, keepdim=True))
    assert torch.equal(second.grad, model.b.weight.detach().sum(0, keepdim=True))
    assert torch.equal(found.kept["tanh"].grad, first.grad + second.grad)


def test_what_is_read_by_one_product_alone_needs_no_other_name() -> None:
    found = run(nn.Linear(2, 2), torch.ones(1, 2))
    assert set(found.run.readings["linear"].values()) == {None}
    both = run(Function(lambda x: x @ x.t()), torch.ones(2, 2))
    assert both.run.readings == {}  # two views of one value err together


def test_operations_without_a_derivative_say_what_they_lose() -> None:
    found = run(Function(lambda x: torch.igamma(x * 1.0, x * 2.0)), torch.tensor([1.0]), back="tried")
    assert {node.name for node in found.run.lost} <= {"mul", "mul_1"}
    assert "mul" in {node.name for node in found.run.lost}  # no derivative by its first argument
