"""A program in the place of its model: outputs by name, key and order, and no switch that torch refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from auditor.verify import Standing


class Made(nn.Module):
    """Returns what it was told to."""

    def __init__(self, output: Any) -> None:
        super().__init__()
        self.output, self.weight = output, nn.Parameter(torch.ones(2))

    def forward(self) -> Any:
        return self.output

    def train(self, mode: bool = True) -> Made:
        raise NotImplementedError("as torch's own programs")


def test_outputs_are_found_as_those_of_most_classes() -> None:
    standing = Standing(Made({"logits": 1, "loss": 2}))
    found = standing.eval()()
    assert (found.logits, found["loss"], found[0], found[:2]) == (1, 2, 1, [1, 2])
    assert dict(found) == {"logits": 1, "loss": 2}
    with pytest.raises(AttributeError, match="the program has no output 'hidden': logits, loss"):
        found.hidden  # noqa: B018
    with pytest.raises(KeyError):
        found["hidden"]
    assert len(list(standing.parameters())) == 1


def test_others_are_handed_on_as_they_are() -> None:
    output = (1, 2)
    assert Standing(Made(output))() is output
