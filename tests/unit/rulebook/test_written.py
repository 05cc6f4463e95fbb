"""Largest values that the author wrote are told from those that the model computed."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from auditor.rulebook.values import written
from tests.subjects import measurement_of, normal


class Masked(nn.Module):
    """A mask in each of the ways that people write one. The product is 1e4 at least: larger than all else that is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("added", torch.full((4, 4), -5e6).triu(1))
        self.large = nn.Parameter(torch.full((4, 4), 5e3))

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        scores = x @ self.large
        filled = scores.masked_fill(~keep, -1e9) / 8
        chosen = torch.where(keep, scores, torch.tensor(-1e8))
        told = (1.0 - keep.float()) * -1e7
        limit = torch.full((4, 4), torch.finfo(x.dtype).min)
        total = (
            filled.softmax(-1) + chosen.softmax(-1) + (scores + told).softmax(-1) + (scores + self.added).softmax(-1)
        )
        return total + (scores + limit.triu(1)).softmax(-1) + scores.clamp(max=2e4)


def test_masks_are_written_and_what_is_computed_is_not() -> None:
    keep = torch.ones(4, 4).tril().bool()
    measured = measurement_of(Masked(), normal(4, 4).abs() + 1, keep)
    found = written(measured.capture, measured.ranges)
    ops = {name: measured.capture.nodes[name].op.split(".")[1] for name in found}
    assert sorted(ops.values()) == sorted(
        ["masked_fill", "div", "where", "mul", "add", "add", "add", "full", "triu"]
    ), ops
    computed = {node.op.split(".")[1] for name, node in measured.capture.nodes.items() if name not in found}
    assert {"matmul", "softmax", "clamp"} <= computed


def test_small_literals_and_large_activations_are_not_written() -> None:
    class Scaled(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x * 4096.0 + 1.0).sum(-1)

    measured = measurement_of(Scaled(), normal(4, 4))
    assert written(measured.capture, measured.ranges) == frozenset()
