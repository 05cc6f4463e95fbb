"""Owners and source lines of toy models whose structure is written beside them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.support.capturing import Function
from tests.support.subjects import capture_of, nodes_by_op, only


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x).sigmoid()


class Nested(nn.Module):
    """Containers of every kind, and one module under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Inner()
        self.again = self.first
        self.blocks = nn.ModuleList([Inner(), nn.Sequential(Inner(), nn.Tanh())])
        self.heads = nn.ModuleDict({"a": nn.Linear(3, 2)})

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x) + self.again(x)
        for block in self.blocks:
            x = block(x)
        return self.heads["a"](x).exp()


def test_owners_through_containers_and_shared_modules() -> None:
    found = capture_of(Nested(), torch.ones(2, 3))
    owners = [(node.op.split(".")[1], node.owner, node.owner_type) for node in found.nodes.values()]
    assert owners == [
        ("linear", "first.lin", "Linear"),
        ("sigmoid", "first", "Inner"),
        ("linear", "first.lin", "Linear"),  # `again` is `first`: one module, one name
        ("sigmoid", "first", "Inner"),
        ("add", "", "Nested"),
        ("linear", "blocks.0.lin", "Linear"),
        ("sigmoid", "blocks.0", "Inner"),
        ("linear", "blocks.1.0.lin", "Linear"),
        ("sigmoid", "blocks.1.0", "Inner"),
        ("tanh", "blocks.1.1", "Tanh"),
        ("linear", "heads.a", "Linear"),
        ("exp", "", "Nested"),
    ]


def test_inputs_are_named_once_and_in_order() -> None:
    found = capture_of(Function(lambda x, y: (x - y) * (x - y).exp()), torch.ones(2), torch.ones(2))
    assert only(found, "mul").inputs == ("sub", "exp")
    assert nodes_by_op(found, "sub")[0].inputs == ("inputs_0", "inputs_1")
    assert only(capture_of(Function(lambda x: x * x), torch.ones(2)), "mul").inputs == ("inputs_0",)
