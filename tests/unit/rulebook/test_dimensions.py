"""Lengths of reductions, sizes of products and steps of recurrences, each worked out beside it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.support.capturing import captured, facts_of


@pytest.mark.parametrize(
    ("function", "shape", "node", "expected"),
    [
        (lambda x: x.sum(), (3, 4), "sum_1", 12),
        (lambda x: x.mean((0, 2)), (3, 4, 5), "mean", 15),  # 3 * 5
        (lambda x: x.softmax(-2), (3, 4, 5), "softmax", 4),
        (lambda x: x.var(1), (3, 4), "var", 4),
        (lambda x: x.cumsum(1), (3, 7), "cumsum", 7),
        (lambda x: x.logsumexp((0, 1)), (3, 7), "logsumexp", 21),
        (lambda x: torch.linalg.vector_norm(x), (3, 7), "linalg_vector_norm", 21),
        (lambda x: F.layer_norm(x, (4, 5)), (3, 4, 5), "layer_norm", 20),
        (lambda x: F.group_norm(x, 2), (3, 4, 5), "group_norm", 10),  # 4 channels in 2 groups, 5 positions each
        (lambda x: F.instance_norm(x), (3, 4, 5), "instance_norm", 5),
        (lambda x: F.adaptive_avg_pool2d(x, 1), (1, 2, 6, 7), "adaptive_avg_pool2d", 42),
        (lambda x: F.scaled_dot_product_attention(x, x, x), (1, 1, 9, 4), "scaled_dot_product_attention", 9),
        (lambda x: F.mse_loss(x, x, reduction="none"), (3, 4), "mse_loss", 1),
        (lambda x: F.triplet_margin_loss(x, x, x), (3, 4), "triplet_margin_loss", 12),
        (lambda x: x.exp(), (3, 4), "exp", None),
    ],
)
def test_reduction_length(function: object, shape: tuple[int, ...], node: str, expected: int | None) -> None:
    assert facts_of(function, torch.ones(shape)).facts[node].reduction_length == expected


@pytest.mark.parametrize(
    ("function", "shapes", "node", "expected"),
    [
        (lambda a, b: a @ b, [(2, 3), (3, 5)], "matmul", (2, 5, 3)),
        (lambda a, b: a @ b, [(7, 2, 3), (3, 5)], "matmul", (14, 5, 3)),  # one product over 7 * 2 rows
        (lambda a, b: a @ b, [(7, 2, 3), (7, 3, 5)], "matmul", (2, 5, 3)),  # seven products
        (lambda a, b: torch.bmm(a, b), [(7, 2, 3), (7, 3, 5)], "bmm", (2, 5, 3)),
        (lambda a, b: a @ b, [(4,), (4,)], "matmul", (1, 1, 4)),
        (lambda a, b: torch.einsum("bid,bjd->bij", a, b), [(7, 2, 3), (7, 5, 3)], "einsum", (2, 5, 3)),
        (lambda a, b: F.conv2d(a, b, stride=2), [(2, 6, 9, 9), (8, 6, 3, 3)], "conv2d", (32, 8, 54)),  # 2*4*4, 6*3*3
        (lambda a, b: F.conv2d(a, b, groups=3), [(1, 6, 4, 4), (9, 2, 1, 1)], "conv2d", (16, 3, 2)),
        (lambda a, b: F.conv1d(a, b), [(6, 5), (9, 6, 2)], "conv1d", (4, 9, 12)),  # no batch
        (lambda a, b: F.conv_transpose1d(a, b), [(2, 6, 5), (6, 4, 3)], "conv_transpose1d", (10, 12, 6)),
        (lambda a, b: F.linear(a, b), [(2, 7, 3), (5, 3)], "linear", (14, 5, 3)),
    ],
)
def test_gemm_size(function: object, shapes: list[tuple[int, ...]], node: str, expected: tuple[int, int, int]) -> None:
    facts = facts_of(function, *(torch.ones(shape) for shape in shapes)).facts[node]
    assert (facts.gemm_m, facts.gemm_n, facts.gemm_k) == expected


def test_rows_and_what_gemm_paddings() -> None:
    facts = facts_of(lambda a, b: F.linear(a, b), torch.ones(2, 13, 20), torch.ones(10, 20)).facts["linear"]
    assert facts.gemm_m_alignment == 2  # 26 rows
    assert facts.gemm_padding == pytest.approx(24 * 16 / (20 * 10) - 1)
    convolved = facts_of(lambda a, b: F.conv2d(a, b), torch.ones(1, 3, 6, 6), torch.ones(16, 3, 3, 3)).facts["conv2d"]
    assert convolved.gemm_m_alignment == 16  # 4 * 4 positions
    assert convolved.gemm_padding == pytest.approx(8 / 3 - 1)
    assert facts_of(torch.exp, torch.ones(2)).facts["exp"].gemm_padding is None


def test_sequence_length_counts_steps_or_calls() -> None:
    batch_first = captured(nn.GRU(3, 4, batch_first=True), torch.ones(2, 9, 3)).facts["gru"]
    time_first = captured(nn.LSTM(3, 4), torch.ones(2, 9, 3)).facts["lstm"]
    unbatched = captured(nn.RNN(3, 4, batch_first=True), torch.ones(6, 3)).facts["rnn_tanh"]
    assert (batch_first.sequence_length, time_first.sequence_length, unbatched.sequence_length) == (9, 2, 6)


def test_widths_that_no_tile_divides_are_named() -> None:
    assert captured(nn.Linear(27, 32), torch.ones(2, 27)).facts["linear"].misaligned == "27"
    assert captured(nn.Linear(27, 10), torch.ones(2, 27)).facts["linear"].misaligned == "10 and 27"
    assert captured(nn.Linear(16, 32), torch.ones(2, 16)).facts["linear"].misaligned is None
    assert captured(nn.Conv2d(3, 8, 3), torch.ones(1, 3, 8, 8)).facts["conv2d"].misaligned == "3"
