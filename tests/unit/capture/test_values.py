"""Which node holds which tensor: identity, views, writes, addresses that are used again, and tensors let go."""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch import Tensor, fx

from auditor.capture.values import Values
from auditor.capture.views import View

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
