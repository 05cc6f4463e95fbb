"""What is read from a torch.fx node."""

from __future__ import annotations

import math

import pytest
import torch
from torch import fx

from auditor.numerics.nodes import (
    argument_at,
    arguments,
    arguments_with_defaults,
    is_collective,
    is_torchs_own,
    op_name,
    op_of,
    operation_of,
    overload_named,
    readers,
    row_of,
    settled,
    shape,
    source,
    viewed,
)
from tests.support.capturing import Function
from tests.support.subjects import capture_of, normal

aten = torch.ops.aten


def nodes_of(function: object, *inputs: torch.Tensor) -> dict[str, fx.Node]:
    graph = capture_of(Function(function), *inputs).graph_module.graph  # type: ignore[arg-type]
    return {node.name: node for node in graph.nodes}


def test_names() -> None:
    assert op_name(aten.softmax.int) == "aten.softmax.int"
    assert op_name(math.sqrt) == "sqrt"
    assert operation_of(aten.add_.Tensor).name == "add_"
    assert overload_named("aten.softmax.int") is aten.softmax.int


def test_what_calls_nothing_is_a_placeholder() -> None:
    nodes = nodes_of(lambda x: x.exp(), normal(2))
    placeholder = next(iter(nodes.values()))
    assert op_of(placeholder) == "placeholder"
    assert not row_of(placeholder).known
    assert row_of(nodes["exp"]).known


def test_values_are_followed_through_reshapes_and_casts() -> None:
    nodes = nodes_of(lambda x: x.exp().reshape(-1).double().sin(), normal(2, 3))
    assert source(nodes["sin"].all_input_nodes[0]) is nodes["exp"]
    assert list(readers(nodes["exp"])) == [nodes["sin"]]


def test_a_view_has_all_entries_of_what_it_views() -> None:
    nodes = nodes_of(lambda x: (x.exp().t(), x.sin()[0], x.cos().chunk(2)[0]), normal(2, 3))
    assert viewed(nodes["t"]) is nodes["exp"]
    assert viewed(nodes["select"]) is None
    assert viewed(nodes["getitem"]) is nodes["chunk"]  # the first of several results


def test_arguments_by_name_and_by_place() -> None:
    node = nodes_of(lambda x: torch.softmax(x, 1), normal(2, 3))["softmax"]
    assert arguments(node)["dim"] == argument_at(node, 1) == 1
    assert "dtype" not in arguments(node)
    assert arguments_with_defaults(node)["dtype"] is argument_at(node, 2) is None
    assert argument_at(node, 9) is None


def test_an_argument_given_by_name_is_found_by_place() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    node = graph.call_function(aten.softmax.int, (x,), {"dim": 1})
    assert argument_at(node, 1) == 1


def test_shapes() -> None:
    nodes = nodes_of(lambda x: x.exp(), normal(2, 3))
    assert shape(nodes["exp"]) == (2, 3)
    with pytest.raises(ValueError, match="no static shape"):
        shape(nodes["output"])


def test_whose_operation_it_is() -> None:
    assert is_torchs_own(aten.exp.default)
    assert is_torchs_own(torch.ops.prims.exp.default)
    assert not is_torchs_own(torch.ops.mkldnn._linear_pointwise.default)
    assert is_collective("_c10d_functional.all_reduce.default")
    assert not is_collective("aten.exp.default")


MADE_OF_NOTHING = [
    aten.empty.memory_format,
    aten.empty_like.default,
    aten.new_empty.default,
    aten.empty_strided.default,
]


@pytest.mark.parametrize("op", [*MADE_OF_NOTHING, aten.new_empty_strided.default, aten.empty_permuted.default], ids=str)
def test_memory_that_nothing_was_written_to_is_the_same_in_every_run(op: object) -> None:
    whatever = torch.tensor([[math.nan, 7.0]]).t()
    found = settled(op, whatever)
    assert found.tolist() == [[0.0], [0.0]]
    assert found.stride() == whatever.stride()
    assert math.isnan(whatever[0, 0])


@pytest.mark.parametrize("op", [aten.add.Tensor, aten.zeros_like.default, math.sqrt], ids=str)
def test_other_results_are_what_they_are(op: object) -> None:
    result = normal(2)
    assert settled(op, result) is result


def test_a_later_result_of_several_views_nothing() -> None:
    nodes = nodes_of(lambda x: x.cos().chunk(2)[1], normal(2, 3))
    (second,) = [node for node in nodes.values() if op_of(node) == "getitem" and node.args[1] == 1]
    assert viewed(second) is None  # it holds other entries than the first, which errors are measured on


def test_another_shape_has_the_same_entries() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    assert viewed(graph.call_function(aten.view.default, (x, [-1]))) is x
    assert viewed(graph.call_function(aten.reshape.default, (x, [-1]))) is x


def test_what_keeps_a_draw_has_the_name_of_what_it_stands_for() -> None:
    capture = capture_of(Function(lambda x: x * torch.rand(2)), normal(2))
    (drawn,) = [node for node in capture.graph_module.graph.nodes if hasattr(node.target, "stands_for")]
    assert op_name(drawn.target) == op_of(drawn) == "aten.rand.default"
