"""The graph of a recording while it is written: names, placeholders before operations, what is exact, what is let go."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from auditor.capture.builder import Builder, Mark, Recording

aten = torch.ops.aten
X = torch.ones(2)


def builder(heard: list[tuple[str, Any]] | None = None) -> Builder:
    observe = None if heard is None else lambda node, value: heard.append((node.name, value))
    return Builder(Recording(), Mark((), None, None, 0), observe)


def operation(made: Builder, op: Any, *sources: fx.Node, value: torch.Tensor = X) -> fx.Node:
    return made.emit(op, sources, {}, value)


def test_names_kinds_and_order() -> None:
    made = builder()
    x = made.input("x", X)
    first = operation(made, aten.exp.default, x)
    weight = made.state("parameter", "blocks.0.a-b", X)  # met later, but nothing comes before the placeholders
    second = operation(made, aten.mul.Tensor, first, weight)
    made.close([second])
    assert [node.name for node in made.recording.graph.nodes] == ["x", "p_blocks_0_a_b", "exp", "mul", "output"]
    assert made.recording.kinds == {"x": "input", "p_blocks_0_a_b": "parameter"}
    assert made.recording.names == {"p_blocks_0_a_b": "blocks.0.a-b"}
    assert made.recording.outputs == ("mul",)


def test_what_no_output_depends_on_is_let_go() -> None:
    made = builder()
    x, unread = made.input("x", X), made.input("unread", X)
    constant = made.constant(X)
    operation(made, aten.exp.default, operation(made, aten.add.Tensor, x, constant))
    made.close([operation(made, aten.sin.default, x)])
    names = [node.name for node in made.recording.graph.nodes]
    assert names == ["x", "unread", "sin", "output"]  # inputs stay: the caller gives them
    assert made.recording.constants == {}
    assert list(made.recording.marks) == ["sin"]
    assert unread.name in made.recording.kinds


def test_a_constant_is_copied_as_it_is_then() -> None:
    made, x = builder(), torch.ones(2)
    node = made.constant(x, "held")
    x.zero_()
    assert made.recording.constants[node.name].tolist() == [1, 1]
    assert made.recording.kinds[node.name] == "held"


def test_what_no_rounding_can_change() -> None:
    made, numbers = builder(), torch.tensor([1, 2])
    index, x = made.input("index", numbers), made.input("x", X)
    doubled = operation(made, aten.mul.Tensor, index, value=numbers)
    chosen = operation(made, aten.argmax.default, x, value=numbers)
    mixed = operation(made, aten.add.Tensor, doubled, chosen, value=numbers)
    assert made.exact == {index, doubled}  # `chosen` is whole, but of what rounding may change
    assert mixed not in made.exact


def test_what_depends_on_the_inputs() -> None:
    made = builder()
    x, weight = made.input("x", X), made.state("parameter", "w", X)
    fixed = operation(made, aten.exp.default, weight)
    both = operation(made, aten.mul.Tensor, fixed, x)
    assert made.fed == {x, both}


def test_marks_and_observers() -> None:
    heard: list[tuple[str, Any]] = []
    made = builder(heard)
    x = made.input("x", X)
    made.mark = Mark((), None, None, 3, "add_")
    node = operation(made, aten.add.Tensor, x, x)
    assert (made.recording.marks[node.name].depth, made.recording.marks[node.name].in_place) == (3, "add_")
    assert [(name, value is X) for name, value in heard] == [("add", True)]


def test_other_kernels_have_other_strides_and_parts_the_names_of_the_whole() -> None:
    made = builder()
    x = made.input("x", X)
    view = made.emit(aten.view.default, (x, [2, 1]), {}, X.view(2, 1))
    part = made.emit(aten._softmax.default, (x, -1, False), {}, X)
    assert view.target is aten.reshape.default
    assert (view.meta["op"], part.meta["op"]) == ("aten.view.default", "aten.softmax.int")
    assert view.meta["val"].shape == (2, 1)
    assert view.meta["val"].is_meta
