"""A plain loop with a recorder. Its NaN is real: a row of the data is constant, so that its standard deviation is 0.

    python examples/watch/plain_loop.py
    python -m auditor replay capsules/step-000150-loss-not-finite

The sensors' readings are normalized per row, as in many tutorials, without an eps. One sensor was off.
"""

import logging

import torch
from torch import nn
from torch.nn import functional as F

import auditor

torch.manual_seed(0)


class Sensors(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 4))

    def forward(self, readings: torch.Tensor) -> torch.Tensor:
        centered = readings - readings.mean(-1, keepdim=True)
        return self.layers(centered / centered.std(-1, keepdim=True))


def readings(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Readings of 64 sensors [64, 32], and the classes [64]. In step 150, sensor 17 gives its last value all the time."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(64, 32, generator=generator)
    if step == 150:
        x[17] = 0.25
    return x, x[:, :4].argmax(-1)


model = Sensors()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
recorder = auditor.watch(model, optimizer)


@recorder.step
def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    return loss


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    for number in range(200):
        step(*readings(number))
