"""What a model keeps: tied and oddly named weights, caches, links to parents, generators, and tensors nobody registered."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from auditor.errors import CaptureError
from auditor.isolation.answer import answer
from tests.support.replaying import Model, assert_same, kinds, linear, operations, replay, replayed
from tests.support.subjects import capture_of, nodes_by_op, normal

X = normal(3, 4)


def test_weights_tied_under_two_names() -> None:
    first, second = linear(4, 4), linear(4, 4, seed=1)
    second.weight = first.weight

    found = replayed(Model(lambda self, x: self.b(self.a(x)), a=first, b=second), X)
    one, other = nodes_by_op(found, "linear")
    assert (one.owner, other.owner) == ("a", "b")
    assert one.inputs[1] == other.inputs[1]
    assert [p.fqn for p in found.placeholders if p.kind == "parameter"] == ["a.weight", "a.bias", "b.bias"]


class Child(nn.Module):
    """Knows the module that it is part of."""

    def __init__(self, parent: nn.Module) -> None:
        super().__init__()
        self.layer = linear(4, 4)
        self.parent = parent

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.parent.scale


def test_modules_that_lead_back_to_their_parent() -> None:
    model = Model(lambda self, x: self.child(x).exp(), scale=nn.Parameter(torch.ones(4) * 2))
    model.child = Child(model)
    found = replayed(model, X)
    assert [node.owner for node in found.nodes.values()] == ["child.layer", "child", ""]
    assert found.aliases == {}


def test_names_that_are_no_identifiers() -> None:
    model = nn.Sequential()
    for name in ("a-b", "a_b", "class", "größe 1", "1"):
        model.add_module(name, linear(4, 4))
    model.register_parameter("p/q", nn.Parameter(torch.ones(4)))
    found = replayed(model, X)
    assert [node.owner for node in nodes_by_op(found, "linear")] == ["a-b", "a_b", "class", "größe 1", "1"]
    assert {p.fqn for p in found.placeholders} >= {"a-b.weight", "a_b.weight", "größe 1.bias", "p/q"}


def test_a_cache_by_dtype() -> None:
    """Rotary embeddings that are computed once a dtype: a run in half leaves no table for the next one."""

    class Rotary(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tables: dict[torch.dtype, Tensor] = {}
            self.layer = linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            if x.dtype not in self.tables:
                self.tables[x.dtype] = torch.arange(4.0).cos().to(x.dtype)
            return self.layer(x) * self.tables[x.dtype]

    model = Rotary()
    found = replayed(model, X)
    assert "cos" in operations(found)
    assert model.tables == {}
    assert_same(replay(found, model, ((X,), {})), answer(model, ((X,), {})))


def test_tensors_that_nobody_registered_are_constants() -> None:
    model = Model(lambda self, x: x * self.table.value + torch.tensor([1.0, 2.0, 3.0, 4.0]))
    object.__setattr__(model, "table", type("Table", (), {"value": torch.ones(4) * 3, "unused": torch.ones(9)})())
    assert kinds(replayed(model, X)) == ["constant", "constant", "input"]


@pytest.mark.parametrize("training", [False, True])
def test_random_numbers_are_the_same_in_every_replay(training: bool) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        own = torch.Generator().manual_seed(3)
        y = self.drop(self.layer(x)) + torch.randn_like(x) * torch.rand(4)
        y = y + torch.empty(4).normal_() + torch.randn(4, generator=own) + torch.randn(4, generator=own)
        return y[torch.randperm(3)] + torch.bernoulli(torch.full((4,), 0.5)) + torch.randint(0, 9, (4,))

    model = Model(forward, layer=linear(4, 4), drop=nn.Dropout(0.5)).train(training)
    found = replayed(model, X)
    assert_same(replay(found, model, ((X,), {})), replay(found, model, ((X,), {})))
    drawn = [node for node in found.nodes.values() if "rand" in node.op]
    assert len(drawn) == 6


def test_a_generator_that_the_caller_hands_over() -> None:
    generator = torch.Generator().manual_seed(3)

    def forward(self: Any, x: Tensor, generator: torch.Generator) -> Tensor:
        return self.layer(x) + torch.randn(4, generator=generator)

    before = generator.get_state()
    replayed(Model(forward, layer=linear(4, 4)), X, generator)
    assert torch.equal(generator.get_state(), before)


def test_writes_that_numpy_makes_are_refused() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        y = x * 2
        y.numpy()[0] = 7
        return y + 1

    with pytest.raises(CaptureError, match="answers differently") as caught:
        capture_of(Model(forward), X)
    assert caught.value.slug == "capture-failed"
