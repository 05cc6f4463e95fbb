"""Small models of several kinds, the same every time."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.architectures.zoo import Specimen, specimen
from tests.support.subjects import normal, seeded
from tests.support.unet import UNet


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.over, self.then = nn.LSTM(8, 16, 2, batch_first=True), nn.GRU(16, 8, batch_first=True)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.then(self.over(x)[0])[0])


class Regions(nn.Module):
    """Switches autocast off around a sum of large squares, and writes a mask's literal."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.enter(x)
        with torch.autocast(x.device.type, enabled=False):
            scale = (hidden.float() * 300).square().mean(-1, keepdim=True).sqrt()
        hidden = hidden.masked_fill(hidden < 0, torch.finfo(hidden.dtype).min).softmax(-1)
        return self.leave(hidden * scale)


class Attribute(nn.Module):
    """Holds a plain tensor, and one in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.shift, self.more = nn.Linear(8, 8), torch.ones(8), [torch.full((8,), 2.0)]

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x + self.shift) * self.more[0]


class Lengths(nn.Module):
    """Its first argument stays on the CPU: it is read as numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, lengths: Tensor, x: Tensor) -> Tensor:
        return torch.stack([self.layer(row)[:length].sum(0) for row, length in zip(x, lengths.tolist(), strict=True)])


class Cells(nn.Module):
    """Decodes step by step, and reads what the steps before gave."""

    def __init__(self) -> None:
        super().__init__()
        self.over, self.then, self.head = nn.LSTMCell(8, 8), nn.GRUCell(8, 8, bias=False), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = cell = state = x.new_zeros(len(x), 8)
        for step in x.unbind(1):
            hidden, cell = self.over(step + state, (hidden, cell))
            state = self.then(hidden, state)
        return self.head(state)


class Unfolded(nn.Module):
    """What autocast leaves alone, with products inside that it lowers."""

    def __init__(self) -> None:
        super().__init__()
        self.place, self.mix = nn.Linear(8, 6), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        grid = F.affine_grid(self.place(x).view(-1, 2, 3).tanh(), [len(x), 1, 4, 4], align_corners=False)
        among = torch.cov(self.mix(x).T)
        return grid, torch.linalg.matrix_power(among, 3), torch.linalg.pinv(among + torch.eye(8, device=x.device))


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(16, 64), nn.LayerNorm(64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 8), nn.Softmax(-1)
    )


def convolutional() -> nn.Module:
    layers = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 8, 1)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3))


def transformer() -> nn.Module:
    return nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[Tensor, ...]]] = {
    "mlp": (mlp, (normal(32, 16),)),
    "convolutional": (convolutional, (normal(2, 3, 16, 16),)),
    "transformer": (transformer, (normal(2, 5, 16),)),
    "recurrent": (Recurrent, (normal(2, 6, 8),)),
    "regions": (Regions, (normal(4, 16),)),
    "attribute": (Attribute, (normal(4, 8),)),
    "cells": (Cells, (normal(2, 3, 8),)),
    "unfolded": (Unfolded, (normal(4, 8),)),
    "lengths": (Lengths, (torch.tensor([2, 3]), normal(2, 4, 8))),
}


def made(name: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """The model, in eval mode, and its inputs."""
    build, inputs = MODELS[name]
    return seeded(build).eval(), inputs


def _convnext() -> Specimen:
    convnext = pytest.importorskip("timm.models.convnext").ConvNeXt
    model = seeded(lambda: convnext(depths=(1, 1, 1, 1), dims=(8, 16, 16, 16), num_classes=10))
    return Specimen(model.eval(), (normal(2, 3, 32, 32),), {})


def _mobilenet() -> Specimen:
    """A stem and two inverted residuals, the second with squeeze and excitation."""
    decode = pytest.importorskip("timm.models._efficientnet_builder").decode_arch_def
    blocks = decode([["ds_r1_k3_s1_e1_c8_nre"], ["ir_r1_k5_s2_e4_c16_se0.25"]])
    net = pytest.importorskip("timm.models.mobilenetv3").MobileNetV3
    model = seeded(lambda: net(blocks, num_classes=10, stem_size=8, num_features=32))
    return Specimen(model.eval(), (normal(2, 3, 32, 32),), {})


def _unet() -> Specimen:
    return Specimen(seeded(lambda: UNet(8)).eval(), (normal(1, 3, 8, 8), torch.tensor([3])), {})


def architecture(name: str) -> Specimen:
    """One as its library writes it, made tiny."""
    own = {"convnext": _convnext, "mobilenet": _mobilenet, "unet": _unet}
    return own[name]() if name in own else specimen(name)
