"""What a recording is run on: state by name, inputs in order, constants, and what the forward calls each of them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from auditor.capture.binding import Binder, named_inputs

A, B, C = torch.tensor([1.0]), torch.tensor([2.0]), torch.tensor([3.0])


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict({"a-b": nn.Linear(1, 1)})
        self.register_buffer("mean", torch.zeros(1))
        self.register_buffer("none", None)

    def forward(self, x: Tensor, pair: tuple[Tensor, Tensor], *, mask: Tensor | None = None) -> Tensor:
        return x


def test_keywords_go_in_the_order_that_was_recorded() -> None:
    binder = Binder(("x", "y"), {}, {}, ("p", "q"))
    found = binder(Model(), ((), {"q": B, "p": A}))
    assert [id(x) for x in found] == [id(A), id(B)]


def test_one_tensor_in_two_places_is_one_input() -> None:
    binder = Binder(("x", "y"), {}, {}, ())
    found = binder(Model(), ((A, (A, B)), {}))
    assert [id(x) for x in found] == [id(A), id(B)]


def test_names_of_the_forwards_arguments() -> None:
    assert named_inputs(Model(), ((A, (B, C)), {"mask": A})) == {id(A): "x", id(B): "pair_0", id(C): "pair_1"}
    assert named_inputs(Model(), ((A,), {"pair": (B, C)})) == {id(A): "x", id(B): "pair_0", id(C): "pair_1"}


def test_names_where_the_call_does_not_fit() -> None:
    assert named_inputs(Model(), ((A, B, C), {})) == {id(A): "input_0", id(B): "input_1", id(C): "input_2"}
