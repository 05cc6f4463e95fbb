"""Values that lie otherwise in memory than a replay's: kernels round otherwise, and a model may magnify it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.any_model.holding import Call, held


class Magnifying(nn.Module):
    """One pixel that lies channels last, written in place, spread out and convolved; then a chaotic map doubles last places.

    Out of place the pixel would lie channels first: with sides of 1 both are true of it.
    """

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.first, self.head = nn.Conv2d(256, 256, 3), nn.Conv2d(256, 64, 3, padding=1)
        self.steps = steps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pixel = self.first(x.contiguous(memory_format=torch.channels_last)).relu_()
        y = self.head(nn.functional.interpolate(pixel, scale_factor=4.0)).sigmoid()
        for _ in range(self.steps):
            y = 4 * y * (1 - y)
        return y


def build(steps: int) -> tuple[nn.Module, Call]:
    torch.manual_seed(0)
    return Magnifying(steps).eval(), ((torch.randn(2, 256, 3, 3),), {})


@pytest.mark.parametrize("steps", [0, 6])
def test_a_replay_that_rounds_otherwise_is_the_run(steps: int) -> None:
    held(lambda: build(steps), max_error=0.5)
