"""FLOPs by hand: a multiply-add is two."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from auditor.numerics.flops import FORMULAS, flops_of
from auditor.numerics.operations import operation
from tests.support.capturing import Function
from tests.support.subjects import capture_of, normal

A, B = normal(3, 5), normal(5, 7)
BATCH, OTHER = normal(2, 3, 5), normal(2, 5, 7)
MAP = normal(2, 4, 6, 6)

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
}


@pytest.mark.parametrize("packet", CASES)
def test_by_hand(packet: str) -> None:
    function, args, expected = CASES[packet]
    graph = capture_of(Function(function), *args).graph_module.graph
    assert [flops_of(node) for node in graph.nodes if flops_of(node)] == [expected]


@pytest.mark.parametrize(("cell", "gates"), [(nn.RNNCell, 1), (nn.GRUCell, 3), (nn.LSTMCell, 4)])
def test_recurrent_cells(cell: Any, gates: int) -> None:
    """2 rows; each gate is 6 numbers made of 5 inputs and of 6 of the state."""
    graph = capture_of(cell(5, 6), normal(2, 5)).graph_module.graph
    assert [flops_of(node) for node in graph.nodes if flops_of(node)] == [2 * 2 * gates * 6 * (5 + 6)]


def test_rows_of_jagged_tensors() -> None:
    """3 rows and 4 rows, each of 7 numbers made of 5."""

    def function(x: Tensor, y: Tensor) -> Tensor:
        ragged = torch.nested.nested_tensor([x, y], layout=torch.jagged)
        return nn.functional.linear(ragged, torch.ones(7, 5)).values()

    graph = capture_of(Function(function), normal(3, 5), normal(4, 5)).graph_module.graph
    assert [flops_of(node) for node in graph.nodes if flops_of(node)] == [2 * (3 + 4) * 7 * 5]


def test_groups_of_what_is_summed_over() -> None:
    """[8, 4 + 12] @ [4 + 12, 16] -> [2, 8, 16]: 8 * 16 entries, each of which sums 4 products, then 12."""
    ends = torch.tensor([4, 16], dtype=torch.int32)
    graph = capture_of(Function(torch._grouped_mm), normal(8, 16), normal(16, 16), ends).graph_module.graph
    assert [flops_of(node) for node in graph.nodes if flops_of(node)] == [2 * 8 * 16 * (4 + 12)]


def test_a_recurrent_layer_by_hand() -> None:
    # 6 steps of 2 samples, by the weights [4 * 5, 3] and [4 * 5, 5]
    graph = capture_of(nn.LSTM(3, 5), normal(6, 2, 3)).graph_module.graph
    assert sum(flops_of(node) for node in graph.nodes) == 2 * 12 * (20 * 3 + 20 * 5)


def test_what_is_no_product_counts_nothing() -> None:
    graph = capture_of(Function(lambda x: x.exp().sum()), A).graph_module.graph
    assert {flops_of(node) for node in graph.nodes} == {0}


def test_every_formula_is_worked_out_here() -> None:
    assert {operation(packet).flops for packet in [*CASES, "lstm", "lstm_cell"]} == FORMULAS.keys()
