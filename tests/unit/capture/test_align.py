"""Which operation of one run is which of another: by module, operation and line, in order."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from auditor.capture.paths import aligned, same_operations
from tests.support.subjects import capture_of, seeded


class Net(nn.Module):
    def __init__(self, turns: int = 2) -> None:
        super().__init__()
        self.layer, self.norm, self.turns = nn.Linear(2, 2), nn.BatchNorm1d(2), turns

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.turns):
            x = self.layer(x).tanh()
        return self.norm(x) + x.tanh()


def test_turns_of_one_line_are_counted() -> None:
    ours, theirs = (capture_of(seeded(partial(Net, turns)), torch.ones(3, 2)) for turns in (2, 3))
    same = same_operations(ours, theirs)
    assert same.keys() == ours.nodes.keys()
    assert same["tanh_2"] == "tanh_3"  # on another line
    assert {same["tanh"], same["tanh_1"]} < {"tanh", "tanh_1", "tanh_2"}


def test_a_batch_norm_is_the_same_in_training_and_out_of_it() -> None:
    model, x = seeded(Net), torch.randn(3, 2, generator=torch.Generator().manual_seed(0))
    evaluated = capture_of(model, x)
    model.norm.train()
    model.eval = lambda: model
    trained = capture_of(model, x)
    same = same_operations(evaluated, trained)
    assert same.keys() == evaluated.nodes.keys()
    assert "batch_norm" in trained.nodes[same["batch_norm"]].op


def test_what_one_run_does_beside_is_left_out() -> None:
    ours = [("a", "exp", 1), ("a", "add", 2), ("b", "exp", 3), ("c", "exp", 4)]
    theirs = [("b", "exp", 30), ("a", "exp", 10), ("a", "to", 11), ("a", "add", 20)]
    assert dict(aligned(ours, theirs)) == {1: 10, 2: 20, 3: 30}
