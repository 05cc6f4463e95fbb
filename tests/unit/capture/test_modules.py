"""Scripts, recurrent layers, modules without a forward of their own, and what a model keeps."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from auditor.errors import CaptureError
from tests.support.refusing import refused
from tests.support.replaying import Model, assert_same, kinds, linear, replay, replayed
from tests.support.subjects import capture_of, nodes_by_op, normal, only

X = normal(3, 4)


class Gated(nn.Module):
    """Branches and loops, which only scripting keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            if bool(x.sum() > -100):
                x = torch.tanh(self.layer(x))
        return x


def test_modules_without_a_forward_of_their_own() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        x = self.layers["in"].forward(x)  # past __call__, so past hooks: its caller owns it
        for layer in self.stack:
            x = layer(x)
        return nn.functional.linear(x, self.weights[0], None)

    model = Model(
        forward,
        layers=nn.ModuleDict({"in": linear(4, 4)}),
        stack=nn.ModuleList([linear(4, 4), nn.Identity()]),
        weights=nn.ParameterList([normal(2, 4)]),
    )
    found = replayed(model, X)
    assert [node.owner for node in nodes_by_op(found, "linear")] == ["", "stack.0", ""]
    assert {p.fqn for p in found.placeholders if p.kind == "parameter"} >= {"weights.0", "layers.in.weight"}


def test_recurrent_layers_stay_whole() -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = [nn.LSTM(4, 3, 2, bidirectional=True), nn.GRU(4, 3), nn.RNN(4, 3), nn.LSTM(4, 3, proj_size=2)]
    for layer, name in zip(layers, ("lstm", "gru", "rnn_tanh", "lstm"), strict=True):
        found = replayed(layer, normal(5, 2, 4))
        assert len(nodes_by_op(found, name)) == 1


def test_the_first_state_of_a_recurrent_layer_follows_the_dtype() -> None:
    found = capture_of(nn.GRU(4, 4, 2, bidirectional=True), normal(10, 1, 4))
    assert only(found, "zeros").literals["fp16"].arguments == {"dtype": torch.float16}
    assert len(nodes_by_op(found, "gru")) == 1


def test_a_script_with_branches_and_loops() -> None:
    found = replayed(Model(lambda self, x: self.part(x * 2).exp(), part=torch.jit.script(Gated())), X, method="path")
    assert found.nodes[found.outputs[0]].owner == ""
    assert {node.owner for node in found.nodes.values()} >= {"", "part"}


# What a model keeps: tied and oddly named weights, caches, links to parents, generators, and tensors nobody registered.


def test_weights_tied_under_two_names() -> None:
    first, second = linear(4, 4), linear(4, 4, seed=1)
    second.weight = first.weight

    found = replayed(Model(lambda self, x: self.b(self.a(x)), a=first, b=second), X)
    one, other = nodes_by_op(found, "linear")
    assert (one.owner, other.owner) == ("a", "b")
    assert one.inputs[1] == other.inputs[1]
    assert [p.fqn for p in found.placeholders if p.kind == "parameter"] == ["a.weight", "a.bias", "b.bias"]


def child(parent: nn.Module) -> nn.Module:
    """Knows the module that it is part of."""
    return Model(lambda m, x: m.layer(x) * m.parent.scale, layer=linear(4, 4), parent=parent)


def test_modules_that_lead_back_to_their_parent() -> None:
    model = Model(lambda self, x: self.child(x).exp(), scale=nn.Parameter(torch.ones(4) * 2))
    model.child = child(model)
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

    with refused(CaptureError, "capture-failed", match="returns other outputs than a replay"):
        capture_of(Model(forward), X)
