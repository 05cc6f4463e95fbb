"""The graph of a run: it binds, computes what the model computes, and names its outputs."""

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from auditor.capture.capture import REPEATS, _check_repeats
from auditor.capture.values import Values
from auditor.capture.views import View
from auditor.errors import CaptureError
from auditor.isolation.outputs import tensor_outputs
from auditor.loading import from_object
from auditor.records import Batch, Capture
from tests.support.replaying import Model, linear, replayed
from tests.support.subjects import capture_of, nodes_by_op, normal, only, seeded


def taken(model: nn.Module, batch: Batch) -> Capture:
    args, kwargs = batch
    return capture_of(model, *args, **kwargs)


def assert_computes(found: Capture, model: nn.Module, batch: Batch) -> None:
    with torch.no_grad():
        actual = tensor_outputs(fx.Interpreter(found.graph_module).run(*found.bind(model, batch)))
        expected = tensor_outputs(model(*batch[0], **batch[1]))
    assert len(actual) == len(expected) == len(found.outputs)
    for a, b in zip(actual, expected, strict=True):
        assert torch.equal(a, b)


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
    model = seeded(Keywords)
    found = taken(model, keywords_batch(0))
    assert_computes(found, model, keywords_batch(0))
    assert_computes(found, model, keywords_batch(10))
    assert_computes(found, model, keywords_batch(10, swapped=True))  # the order of keywords means nothing


def test_placeholders_know_what_they_are() -> None:
    found = taken(seeded(Keywords), keywords_batch(0))
    kinds = {p.fqn: p.kind for p in found.placeholders if p.kind != "constant" and p.fqn}
    assert kinds == {"lin.weight": "parameter", "lin.bias": "parameter", "shift": "buffer", "unsaved": "buffer"}
    assert sum(p.kind == "input" for p in found.placeholders) == 4


def test_an_answer_that_rounding_does_not_explain_is_refused() -> None:
    model, batch = seeded(lambda: nn.Linear(8, 8)), ((normal(4, 8),), {})
    found, subject, answer = taken(model, batch), from_object(model, batch[0]), [model(*batch[0]).detach()]
    _check_repeats(found, subject, batch, answer)
    for other in ([answer[0] * (1 + 2 * REPEATS)], []):
        with pytest.raises(CaptureError, match="returns other outputs than a replay"):
            _check_repeats(found, subject, batch, other)


# Which module calls enclose an operation, whatever way control leaves a module.

X = normal(2, 4)


class Tree(nn.Module):
    """Calls itself."""

    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.layer, self.depth = linear(4, 4), depth

    def forward(self, x: Tensor, depth: int | None = None) -> Tensor:
        depth = self.depth if depth is None else depth
        return self(self.layer(x), depth - 1) if depth else x.tanh()


def test_recursion() -> None:
    found = replayed(Model(lambda self, x: self.tree(x), tree=Tree()), X)
    calls = only(found, "tanh").calls
    assert [call.path for call in calls] == ["", "tree", "tree", "tree"]
    assert len({call.key for call in calls}) == 4


def test_two_calls_of_one_module_are_told_apart() -> None:
    found = replayed(Model(lambda self, x: self.a(self.a(x)), a=linear(4, 4)), X)
    first, second = (node.calls[-1] for node in nodes_by_op(found, "linear"))
    assert (first.path, first.depth) == (second.path, second.depth) == ("a", 1)
    assert first.key != second.key


def failing() -> nn.Module:
    return Model(lambda m, x: m.inner(x), inner=Raising())


class Raising(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise LookupError


def test_exceptions_close_every_call_that_they_leave() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        for _ in range(3):
            try:
                self.failing(x)
            except LookupError:
                x = self.layer(x)
        return x.exp()

    found = replayed(Model(forward, failing=failing(), layer=linear(4, 4)), X)
    assert [node.owner for node in nodes_by_op(found, "linear")] == ["layer"] * 3
    assert [call.path for call in only(found, "exp").calls] == [""]


# Which node holds which tensor: identity, views, writes, addresses that are used again, and tensors let go.

aten = torch.ops.aten


class Reel:
    """A graph that is written by hand, and how many constants it was asked for."""

    def __init__(self) -> None:
        self.graph, self.constants = fx.Graph(), []
        self.values = Values(self.emit, self.constant)

    def emit(self, target: Any, args: Any, kwargs: Any, value: Any) -> fx.Node:
        kind = "call_method" if isinstance(target, str) else "call_function"
        node = self.graph.create_node(kind, target, args, kwargs)
        node.meta["val"] = torch.empty_like(value, device="meta")
        return node

    def constant(self, x: Tensor) -> fx.Node:
        self.constants.append(x.clone())
        node = self.graph.placeholder(f"constant_{len(self.constants)}")
        node.meta["val"] = torch.empty_like(x, device="meta")
        return node

    def bound(self, x: Tensor) -> fx.Node:
        """A node of its own for a tensor."""
        node = self.emit("made", (), {}, x)
        self.values.bind(x, node)
        return node

    def targets(self) -> list[str]:
        return [str(node.target) for node in self.graph.nodes]


def test_an_address_that_is_used_again_is_another_tensor() -> None:
    reel = Reel()
    for _ in range(50):
        x = torch.ones(1000)
        reel.bound(x)
        view = x[1:]
        reel.values.bind_view(view, reel.emit("view", (), {}, view), x, View(aten.slice.Tensor, (0, 1, 1000)))
        reel.values.write(view, reel.emit("written", (), {}, view))
        del x, view
    assert reel.targets().count("aten.slice_scatter.default") == 50
    assert not reel.constants


def test_another_python_object_on_known_memory_is_no_constant() -> None:
    reel, x = Reel(), torch.zeros(4, 6)
    node = reel.bound(x)
    assert reel.values.node_of(x.data) is node
    transposed = reel.values.node_of(x.t())
    assert (transposed.target, transposed.args) == (aten.permute.default, (node, [1, 0]))
    part = reel.values.node_of(x[1:3])
    assert (part.target, part.args) == (aten.slice.Tensor, (node, 0, 1, 3))
    assert reel.values.node_of(x[::2, ::3]).op == "call_function"
    assert len(reel.constants) == 1  # the places of the last one


def test_memory_that_autograd_kept_is_known_after_its_tensor_is_gone() -> None:
    reel, x = Reel(), torch.ones(3)
    reel.bound(x)
    kept = x.untyped_storage()
    del x
    gc.collect()
    again = torch.empty(0).set_(kept, 0, (3,))
    assert reel.values.node_of(again).target == "made"
    assert not reel.constants
