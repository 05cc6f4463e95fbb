"""Which operation of one run is which of another: by module, operation, line and turn."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from auditor.capture.places import places_of
from tests.subjects import capture_of, seeded


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(2, 2), nn.BatchNorm1d(2)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = self.layer(x).tanh()
        return self.norm(x) + x.tanh()


def test_turns_of_one_line_are_counted() -> None:
    found = places_of(capture_of(seeded(Net), torch.ones(3, 2)))
    turns = [(owner, op, turn) for owner, op, _, turn in found]
    assert turns == [
        ("layer", "linear", 0),
        ("", "tanh", 0),
        ("layer", "linear", 1),
        ("", "tanh", 1),
        ("norm", "batch_norm", 0),
        ("", "tanh", 0),  # on another line
        ("", "add", 0),
    ]
    lines = [line for owner, op, line, _ in found if op == "tanh"]
    assert lines[0] == lines[1] != lines[2]
    assert list(found.values()) == ["linear", "tanh", "linear_1", "tanh_1", "batch_norm", "tanh_2", "add"]


def test_a_batch_norm_is_the_same_in_training_and_out_of_it() -> None:
    model, x = seeded(Net), torch.randn(3, 2, generator=torch.Generator().manual_seed(0))
    evaluated = places_of(capture_of(model, x))
    model.norm.train()
    model.eval = lambda: model  # type: ignore[method-assign]
    trained = places_of(capture_of(model, x))
    names = [(owner, op, turn) for owner, op, _, turn in trained]
    assert ("norm", "batch_norm", 0) in names
    assert evaluated.keys() <= trained.keys()
