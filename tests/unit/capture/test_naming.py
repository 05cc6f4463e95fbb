"""Owners and source lines of toy models whose structure is written beside them."""

from __future__ import annotations

import inspect
from pathlib import Path

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


class Lines(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x.exp()
        x = self.lin(x)
        return twisted(x)


def twisted(x: Tensor) -> Tensor:
    return x.tanh()


def test_source_is_the_line_that_wrote_the_operation() -> None:
    start = inspect.getsourcelines(Lines.forward)[1]  # the line of `def forward`
    helper = inspect.getsourcelines(twisted)[1]
    here = Path(__file__)
    found = capture_of(Lines(), torch.ones(1, 3))
    exp, linear, tanh = only(found, "exp"), only(found, "linear"), only(found, "tanh")
    assert (exp.source, exp.code) == (f"{here.name}:{start + 1}", "x = x.exp()")
    assert (linear.source, linear.code) == (f"{here.name}:{start + 2}", "x = self.lin(x)")  # not torch's linear.py
    assert (tanh.source, tanh.code) == (f"{here.name}:{helper + 1}", "return x.tanh()")  # not the line that calls it
    assert {node.source_path for node in (exp, linear, tanh)} == {str(here)}


def test_inputs_are_named_once_and_in_order() -> None:
    found = capture_of(Function(lambda x, y: (x - y) * (x - y).exp()), torch.ones(2), torch.ones(2))
    assert only(found, "mul").inputs == ("sub", "exp")
    assert nodes_by_op(found, "sub")[0].inputs == ("inputs_0", "inputs_1")
    assert only(capture_of(Function(lambda x: x * x), torch.ones(2)), "mul").inputs == ("inputs_0",)
