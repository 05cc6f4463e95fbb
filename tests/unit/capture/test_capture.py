"""The graph of a run: it binds, computes what the model computes, and names its outputs."""

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from auditor.capture.values import Values
from auditor.capture.views import View
from auditor.errors import CaptureError
from auditor.isolation.run_model import run_model
from auditor.records import Batch
from tests.support.capturing import Function
from tests.support.refusing import refused
from tests.support.replaying import Model, assert_same, kinds, linear, replay, replayed
from tests.support.subjects import capture_of, nodes_by_op, normal, only, seeded


class Keywords(nn.Module):
    """Asymmetric in everything it takes, so that a swap of two inputs shows."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(2, 2)
        self.register_buffer("shift", torch.tensor([1.0, 2.0]))
        self.register_buffer("unsaved", torch.tensor(3.0), persistent=False)
        self.table = torch.tensor([5.0, 7.0])

    def forward(self, x: Tensor, y: Tensor, *, low: Tensor, high: Tensor) -> dict[str, Any]:
        z = self.lin(x) - y / self.shift * self.unsaved + self.table
        return {"z": z, "rest": [low - 2 * high, (z.argmax(-1), None)]}


def keywords_batch(seed: int, *, swapped: bool = False) -> Batch:
    kwargs = {"high": normal(2, seed=seed + 1), "low": normal(2, seed=seed + 2)}
    if swapped:
        kwargs = dict(reversed(kwargs.items()))
    return (normal(3, 2, seed=seed + 3), normal(3, 2, seed=seed + 4)), kwargs


def test_bound_inputs_reach_their_own_places() -> None:
    model, (args, kwargs) = seeded(Keywords), keywords_batch(0)
    found = replayed(model, *args, **kwargs)
    for batch in (keywords_batch(10), keywords_batch(10, swapped=True)):  # the order of keywords means nothing
        assert_same(replay(found, model, batch), run_model(model, batch))


def test_placeholders_know_what_they_are() -> None:
    args, kwargs = keywords_batch(0)
    found = capture_of(seeded(Keywords), *args, **kwargs)
    kinds = {p.fqn: p.kind for p in found.placeholders if p.kind != "constant" and p.fqn}
    assert kinds == {"lin.weight": "parameter", "lin.bias": "parameter", "shift": "buffer", "unsaved": "buffer"}
    assert sum(p.kind == "input" for p in found.placeholders) == 4


# Which module calls enclose an operation, whatever way control leaves a module.

X = normal(3, 4)


def test_recursion() -> None:
    def forward(self: Any, x: Tensor, depth: int = 2) -> Tensor:
        return self(self.layer(x), depth - 1) if depth else x.tanh()

    found = replayed(Model(lambda self, x: self.tree(x), tree=Model(forward, layer=linear(4, 4))), X)
    calls = only(found, "tanh").calls
    assert [call.path for call in calls] == ["", "tree", "tree", "tree"]
    assert len({call.key for call in calls}) == 4


def test_two_calls_of_one_module_are_told_apart() -> None:
    found = replayed(Model(lambda self, x: self.a(self.a(x)), a=linear(4, 4)), X)
    first, second = (node.calls[-1] for node in nodes_by_op(found, "linear"))
    assert (first.path, first.depth) == (second.path, second.depth) == ("a", 1)
    assert first.key != second.key


def test_exceptions_close_every_call_that_they_leave() -> None:
    def raising(x: Tensor) -> Tensor:
        raise LookupError

    def forward(self: Any, x: Tensor) -> Tensor:
        for _ in range(3):
            try:
                self.failing(x)
            except LookupError:
                x = self.layer(x)
        return x.exp()

    failing = Model(lambda self, x: self.inner(x), inner=Function(raising))
    found = replayed(Model(forward, failing=failing, layer=linear(4, 4)), X)
    assert [node.owner for node in nodes_by_op(found, "linear")] == ["layer"] * 3
    assert [call.path for call in only(found, "exp").calls] == [""]


def test_an_address_that_is_used_again_is_another_tensor() -> None:
    graph, constants = fx.Graph(), list[Tensor]()

    def emit(target: Any, args: Any, kwargs: Any, value: Tensor) -> fx.Node:
        kind = "call_method" if isinstance(target, str) else "call_function"
        node = graph.create_node(kind, target, args, kwargs)
        node.meta["val"] = torch.empty_like(value, device="meta")
        return node

    values = Values(emit, constants.append)
    for _ in range(50):
        x = torch.ones(1000)
        values.bind(x, emit("made", (), {}, x))
        view = x[1:]
        values.bind_view(view, emit("view", (), {}, view), x, View(torch.ops.aten.slice.Tensor, (0, 1, 1000)))
        values.write(view, emit("written", (), {}, view))
        del x, view
    assert [str(node.target) for node in graph.nodes].count("aten.slice_scatter.default") == 50
    assert not constants


# Scripts, recurrent layers, modules without a forward of their own, and what a model keeps.


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
    def layers() -> nn.Module:
        both, projected = nn.LSTM(4, 3, 2, bidirectional=True), nn.LSTM(4, 3, proj_size=2)
        return nn.ModuleList([both, nn.GRU(4, 3), nn.RNN(4, 3), projected])

    for layer, name in zip(seeded(layers), ("lstm", "gru", "rnn_tanh", "lstm"), strict=True):
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
