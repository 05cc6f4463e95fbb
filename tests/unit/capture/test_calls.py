"""Which module calls enclose an operation, whatever way control leaves a module."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from tests.support.replaying import Model, linear, replayed
from tests.support.subjects import nodes_by_op, normal, only

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


class Failing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Raising()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


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

    found = replayed(Model(forward, failing=Failing(), layer=linear(4, 4)), X)
    assert [node.owner for node in nodes_by_op(found, "linear")] == ["layer"] * 3
    assert [call.path for call in only(found, "exp").calls] == [""]
