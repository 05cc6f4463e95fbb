"""What is read from a torch.fx node: its names, its FLOPs, and what autocast makes of its arguments."""

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from auditor.numerics.autocast import autocast_arguments
from auditor.numerics.casting import carried_in, in_format
from auditor.numerics.flops import FORMULAS, flops_of
from auditor.numerics.formats import FORMATS
from auditor.numerics.functions import function_name, functions_by_name
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
    row_of,
    shape,
    view_source,
    wait_for_result,
)
from auditor.numerics.operations import operation
from tests.support.capturing import Function
from tests.support.subjects import capture_of, normal

aten = torch.ops.aten


def nodes_of(function: object, *inputs: torch.Tensor) -> dict[str, fx.Node]:
    graph = capture_of(Function(function), *inputs).graph_module.graph
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


def test_a_view_has_all_entries_of_what_it_views() -> None:
    nodes = nodes_of(lambda x: (x.exp().t(), x.sin()[0], x.cos().chunk(2)[0]), normal(2, 3))
    assert view_source(nodes["t"]) is nodes["exp"]
    assert view_source(nodes["select"]) is None
    assert view_source(nodes["getitem"]) is nodes["chunk"]  # the first of several results


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
    found = wait_for_result(op, whatever)
    assert found.tolist() == [[0.0], [0.0]]
    assert found.stride() == whatever.stride()
    assert math.isnan(whatever[0, 0])


@pytest.mark.parametrize("op", [aten.add.Tensor, aten.zeros_like.default, math.sqrt], ids=str)
def test_other_results_are_what_they_are(op: object) -> None:
    result = normal(2)
    assert wait_for_result(op, result) is result


def test_a_later_result_of_several_views_nothing() -> None:
    nodes = nodes_of(lambda x: x.cos().chunk(2)[1], normal(2, 3))
    (second,) = [node for node in nodes.values() if op_of(node) == "getitem" and node.args[1] == 1]
    assert view_source(second) is None  # it holds other entries than the first, which errors are measured on


def test_what_keeps_a_draw_has_the_name_of_what_it_stands_for() -> None:
    capture = capture_of(Function(lambda x: x * torch.rand(2)), normal(2))
    (drawn,) = [node for node in capture.graph_module.graph.nodes if hasattr(node.target, "stands_for")]
    assert op_name(drawn.target) == op_of(drawn) == "aten.rand.default"


# One name for all spellings of a function, none for those in place.


def test_names_of_functions() -> None:
    assert function_name(torch.Tensor.exp_) == ""
    assert function_name(torch.Tensor.__rpow__) == "rpow"
    assert function_name(torch.exp) == function_name(torch.Tensor.exp) == "exp"


def test_all_spellings_are_found_by_name() -> None:
    found = functions_by_name()
    assert {torch.pow, torch.Tensor.pow} <= set(found["pow"])
    assert {torch.softmax, torch.Tensor.softmax, F.softmax} <= set(found["softmax"])
    assert "" not in found
    assert all(function_name(function) == name for name, functions in found.items() for function in functions)


# FLOPs by hand: a multiply-add is two.

A, B = normal(3, 5), normal(5, 7)
BATCH, OTHER = normal(2, 3, 5), normal(2, 5, 7)
MAP = normal(2, 4, 6, 6)


def jagged(x: Tensor, y: Tensor) -> Tensor:
    ragged = torch.nested.nested_tensor([x, y], layout=torch.jagged)
    return nn.functional.linear(ragged, torch.ones(7, 5)).values()


CASES: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...], int]] = {
    "mm": (torch.mm, (A, B), 2 * 3 * 7 * 5),
    "bmm": (torch.bmm, (BATCH, OTHER), 2 * 2 * 3 * 7 * 5),
    "vdot": (torch.vdot, (normal(9), normal(9)), 2 * 9),
    "addmm": (torch.addmm, (normal(7), A, B), 2 * 3 * 7 * 5),
    "addbmm": (torch.addbmm, (normal(3, 7), BATCH, OTHER), 2 * 2 * 3 * 7 * 5),
    "_grouped_mm": (  # 16 rows, each with the matrix of one of two groups
        torch._grouped_mm,
        (normal(16, 8), normal(2, 8, 16), torch.tensor([4, 16], dtype=torch.int32)),
        2 * 16 * 8 * 16,
    ),
    "conv2d": (  # 2 samples, 8 channels out, 4x4 positions; each sums over 4 channels of 3x3
        torch.conv2d,
        (MAP, normal(8, 4, 3, 3)),
        2 * (2 * 8 * 4 * 4) * (4 * 3 * 3),
    ),
    "conv_transpose2d": (  # each of 2 * 4 * 6 * 6 entries goes into 8 channels of 3x3
        torch.conv_transpose2d,
        (MAP, normal(4, 8, 3, 3)),
        2 * (2 * 4 * 6 * 6) * (8 * 3 * 3),
    ),
    "scaled_dot_product_attention": (  # 3 queries, 5 keys, width 4: scores, then values of width 6
        nn.functional.scaled_dot_product_attention,
        (normal(2, 3, 4), normal(2, 5, 4), normal(2, 5, 6)),
        2 * 2 * 3 * 5 * 4 + 2 * 2 * 3 * 5 * 6,
    ),
    "einsum": (lambda x, y: torch.einsum("ij,jk->ik", x, y), (A, B), 2 * 3 * 7 * 5),
    "linear": (jagged, (normal(3, 5), normal(4, 5)), 2 * (3 + 4) * 7 * 5),
    "groups of what is summed over": (  # [8, 4 + 12] @ [4 + 12, 16] -> [2, 8, 16]: each entry sums 4 products, then 12
        torch._grouped_mm,
        (normal(8, 16), normal(16, 16), torch.tensor([4, 16], dtype=torch.int32)),
        2 * 8 * 16 * (4 + 12),
    ),
    # 2 rows; each gate is 6 numbers made of 5 inputs and of 6 of the state
    "rnn_tanh_cell": (nn.RNNCell(5, 6), (normal(2, 5),), 2 * 2 * 1 * 6 * (5 + 6)),
    "gru_cell": (nn.GRUCell(5, 6), (normal(2, 5),), 2 * 2 * 3 * 6 * (5 + 6)),
    "lstm_cell": (nn.LSTMCell(5, 6), (normal(2, 5),), 2 * 2 * 4 * 6 * (5 + 6)),
    # 6 steps of 2 samples, by the weights [4 * 5, 3] and [4 * 5, 5]
    "lstm": (nn.LSTM(3, 5), (normal(6, 2, 3),), 2 * 12 * (20 * 3 + 20 * 5)),
}


@pytest.mark.parametrize("packet", CASES)
def test_by_hand(packet: str) -> None:
    function, args, expected = CASES[packet]
    graph = capture_of(Function(function), *args).graph_module.graph
    assert [flops_of(node) for node in graph.nodes if flops_of(node)] == [expected]


def test_what_is_no_product_counts_nothing() -> None:
    graph = capture_of(Function(lambda x: x.exp().sum()), A).graph_module.graph
    assert {flops_of(node) for node in graph.nodes} == {0}


def test_every_formula_is_worked_out_here() -> None:
    assert {operation(packet).flops for packet in CASES} - {""} == FORMULAS.keys()


# What autocast makes of an operation's arguments, by dtype.

HALF, FLOAT = torch.ones(2).half(), torch.ones(2)


def test_keywords_are_cast_too() -> None:
    _, kwargs = autocast_arguments("aten.linear.default", (), {"input": FLOAT, "bias": None}, FORMATS["bf16"])
    assert kwargs["input"].dtype is torch.bfloat16
    _, kept = autocast_arguments("aten.sum.default", (), {"self": HALF, "dtype": torch.float16}, FORMATS["fp16"])
    assert kept["self"].dtype is torch.float16


def test_a_recurrent_layer_is_lowered_to_fp16_where_autocast_takes_the_format() -> None:
    args, _ = autocast_arguments("aten.lstm.input", (FLOAT,), {}, FORMATS["bf16"])
    assert [x.dtype for x in args if isinstance(x, Tensor)] == [torch.float16]
    args, _ = autocast_arguments("aten.lstm.input", (FLOAT,), {}, FORMATS["fp8_e4m3"])  # none of autocast's: as asked
    assert carried_in(args[0]) is FORMATS["fp8_e4m3"]


def test_a_format_that_torch_lacks_is_asked_for_as_a_dtype_is() -> None:
    carried, row = in_format(FLOAT, FORMATS["fp8_e4m3"]), FORMATS["fp8_e4m3"]
    args, _ = autocast_arguments("aten.softmax.int", (carried, 0, row), {}, row)
    assert carried_in(args[0]) is row
    args, _ = autocast_arguments("aten.softmax.int", (carried, 0), {}, row)
    assert carried_in(args[0]) is None  # raised to FP32 where no dtype is given
