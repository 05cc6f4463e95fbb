"""A mobile net trained on digits, whose weights lie beside this file, since every processor trains another net.

ATEN_CPU_CAPABILITY=default python -m tests.unit.measure.mobile_net
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

WEIGHTS = Path(__file__).with_suffix(".safetensors")
WIDTH = 16
EPOCHS = 12
TRAINED_ON = 1400
SLIMMED = 0.01
"""Weight of the penalty on the scales of the batch norms before depthwise layers (network slimming), which leaves some
channels small; the next batch norm makes them large again, and folding multiplies the depthwise weight by that."""


def block(inputs: int, outputs: int, stride: int = 1) -> nn.Module:
    """A depthwise convolution over positions, then a pointwise one over channels."""
    depthwise = nn.Conv2d(inputs, inputs, 3, stride, 1, groups=inputs, bias=False)
    pointwise = nn.Conv2d(inputs, outputs, 1, bias=False)
    return nn.Sequential(depthwise, nn.BatchNorm2d(inputs), nn.ReLU6(), pointwise, nn.BatchNorm2d(outputs), nn.ReLU6())


def mobile_net() -> nn.Module:
    stem = [nn.Conv2d(1, WIDTH, 3, 1, 1, bias=False), nn.BatchNorm2d(WIDTH), nn.ReLU6()]
    blocks = [block(WIDTH, 2 * WIDTH, 2), block(2 * WIDTH, 2 * WIDTH)]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2 * WIDTH, 10)]
    return nn.Sequential(*stem, *blocks, *head)


def digits() -> tuple[Tensor, Tensor]:
    datasets = pytest.importorskip("sklearn.datasets")
    data = datasets.load_digits()
    images = torch.tensor(data.images, dtype=torch.float32)[:, None] / 16
    return images, torch.tensor(data.target)


def batches(epoch: int) -> Iterator[Tensor]:
    order = torch.randperm(TRAINED_ON, generator=torch.Generator().manual_seed(epoch))
    yield from order.split(64)


def trained_here() -> nn.Module:
    """The net, trained on this machine."""
    images, labels = digits()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = mobile_net()
    slimmed = [model[1].weight, model[3][4].weight]
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=5e-4)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, EPOCHS)
    for epoch in range(EPOCHS):
        for rows in batches(epoch):
            optimizer.zero_grad()
            penalty = SLIMMED * sum(scales.abs().sum() for scales in slimmed)
            (F.cross_entropy(model(images[rows]), labels[rows]) + penalty).backward()
            optimizer.step()
        schedule.step()
    return model.eval()


def stored() -> nn.Module:
    """The net with the weights that are stored."""
    model = mobile_net()
    model.load_state_dict(load_file(WEIGHTS))
    return model.eval()


if __name__ == "__main__":
    save_file(trained_here().state_dict(), WEIGHTS)
