"""The FP32 run under autograd: the model's own answer, and a gradient at every value, each worked out by hand."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from auditor.measure.reference import TRIED, TRUSTED, Back, Reference
from tests.capturing import Function
from tests.subjects import capture_of, seeded


class Kept(Reference):
    """Keeps every value."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.kept: dict[str, Any] = {}

    def run_node(self, n: Any) -> Any:
        value = super().run_node(n)
        self.kept[n.name] = value
        if isinstance(value, Tensor) and value.requires_grad:
            value.retain_grad()
        return value


def run(model: nn.Module, *inputs: Tensor, back: Back = TRUSTED) -> Kept:
    captured = capture_of(model, *inputs)
    reference = Kept(captured.graph_module, back)
    values = captured.bind(model, (inputs, {}))
    leaves = [x.detach().requires_grad_(x.is_floating_point()) for x in values]
    reference.run(*leaves)
    return reference


def test_every_value_has_the_gradient_of_its_readers() -> None:
    found = run(Function(lambda x: (x * 3.0).square()), torch.tensor([2.0]))
    found.kept["square"].sum().backward()
    assert found.kept["square"].item() == 36.0
    assert found.kept["mul"].grad.item() == 12.0  # d y^2 / dy at 6
    assert found.kept["square"].grad.item() == 1.0


def test_a_value_that_depends_on_no_input_has_a_gradient_too() -> None:
    found = run(Function(lambda x: x * torch.arange(2.0)), torch.tensor([5.0, 7.0]))
    assert len(found.anchors) == 1
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
    first, second = found.readings["linear"]["tanh"], found.readings["linear_1"]["tanh"]
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
    assert set(found.readings["linear"].values()) == {None}
    both = run(Function(lambda x: x @ x.t()), torch.ones(2, 2))
    assert both.readings == {}  # two views of one value err together


def test_operations_without_a_derivative_say_what_they_lose() -> None:
    found = run(Function(lambda x: torch.igamma(x * 1.0, x * 2.0)), torch.tensor([1.0]), back=TRIED)
    assert {node.name for node in found.lost} <= {"mul", "mul_1"}
    assert "mul" in {node.name for node in found.lost}  # no derivative by its first argument
