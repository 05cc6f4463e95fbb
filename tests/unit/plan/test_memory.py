"""Bytes of a forward pass against sums done by hand."""

from __future__ import annotations

import pytest
from torch import Tensor, nn

from auditor.plan.costs import costs_of, memory_of
from auditor.plan.problem import Problem
from auditor.records import Capture, Memory, Verdict
from tests.support.problems import NOTHING
from tests.support.subjects import capture_of, normal


class Chain(nn.Module):
    """x [8, 16] -> [8, 64] -> a view of it -> relu -> [8, 4]."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(16, 64, bias=False), nn.Linear(64, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.narrow(self.wide(x).reshape(8, 64).relu())


WEIGHTS = 16 * 64 + 64 * 4  # numbers


def memory_under(capture: Capture, strategy: str, labels: dict[str, str]) -> Memory:
    every = [*capture.nodes, *(placeholder.name for placeholder in capture.placeholders)]
    verdicts = dict.fromkeys(capture.nodes, Verdict("safe", ""))
    problem = Problem(capture, costs_of(capture), dict.fromkeys(every, NOTHING), verdicts, strategy, "fp16", "A100")
    return memory_of(capture, problem.costs, problem.resolve(lambda owner: labels.get(owner, "fp32")), problem.format)


LOW = {"": "fp16", "wide": "fp16", "narrow": "fp16"}


@pytest.mark.parametrize(
    ("strategy", "labels", "weights", "activations"),
    [
        # the input of 8 * 16 is the caller's; the peak is relu: what it reads and what it makes, 8 * 64 each
        ("cast", {}, 4 * WEIGHTS, 4 * (128 + 512 + 512)),
        ("cast", LOW, 2 * WEIGHTS, 2 * (128 + 512 + 512)),
        # FP32 input; the low copies of input and weight, 2 * (128 + 1024), beside the 2 * 512 of the first product
        ("autocast", LOW, 4 * WEIGHTS, 4 * 128 + 2 * (128 + 1024) + 2 * 512),
        # the root lowers the input; the island's weight is FP32, and its FP32 result lies beside the low copy of it
        ("cast", {**LOW, "wide": "fp32"}, 4 * 1024 + 2 * 256, 2 * 128 + 4 * 512 + 2 * 512),
    ],
)
def test_weights_and_the_peak_by_hand(strategy: str, labels: dict[str, str], weights: int, activations: int) -> None:
    assert memory_under(capture_of(Chain(), normal(8, 16)), strategy, labels) == Memory(weights, activations)
