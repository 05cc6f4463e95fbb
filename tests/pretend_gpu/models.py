"""Small models of several kinds, the same every time."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils import _pytree as pytree

from tests.architectures.zoo import Specimen, specimen
from tests.support.replaying import Model
from tests.support.subjects import normal, seeded
from tests.support.unet import UNet


class Attribute(nn.Module):
    """Holds a plain tensor, and one in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.shift, self.more = nn.Linear(8, 8), torch.ones(8), [torch.full((8,), 2.0)]

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x + self.shift) * self.more[0]


def recurrent(m: Any, x: Tensor) -> Tensor:
    return m.head(m.then(m.over(x)[0])[0])


def regions(m: Any, x: Tensor) -> Tensor:
    """Switches autocast off around a sum of large squares, and writes a mask's literal."""
    hidden = m.enter(x)
    with torch.autocast(x.device.type, enabled=False):
        scale = (hidden.float() * 300).square().mean(-1, keepdim=True).sqrt()
    hidden = hidden.masked_fill(hidden < 0, torch.finfo(hidden.dtype).min).softmax(-1)
    return m.leave(hidden * scale)


def lengths(m: Any, lengths: Tensor, x: Tensor) -> Tensor:
    """Its first argument stays on the CPU: it is read as numbers."""
    return torch.stack([m.layer(row)[:length].sum(0) for row, length in zip(x, lengths.tolist(), strict=True)])


def cells(m: Any, x: Tensor) -> Tensor:
    """Decodes step by step, and reads what the steps before gave."""
    hidden = cell = state = x.new_zeros(len(x), 8)
    for step in x.unbind(1):
        hidden, cell = m.over(step + state, (hidden, cell))
        state = m.then(hidden, state)
    return m.head(state)


def unfolded(m: Any, x: Tensor) -> tuple[Tensor, ...]:
    """What autocast leaves alone, with products inside that it lowers."""
    grid = F.affine_grid(m.place(x).view(-1, 2, 3).tanh(), [len(x), 1, 4, 4], align_corners=False)
    among = torch.cov(m.mix(x).T)
    return grid, torch.linalg.matrix_power(among, 3), torch.linalg.pinv(among + torch.eye(8, device=x.device))


def rnn() -> nn.Module:
    layers = {"over": nn.LSTM(8, 16, 2, batch_first=True), "then": nn.GRU(16, 8, batch_first=True)}
    return Model(recurrent, **layers, head=nn.Linear(8, 4))


def decoder() -> nn.Module:
    return Model(cells, over=nn.LSTMCell(8, 8), then=nn.GRUCell(8, 8, bias=False), head=nn.Linear(8, 4))


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(16, 64), nn.LayerNorm(64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 8), nn.Softmax(-1)
    )


def convolutional() -> nn.Module:
    layers = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 8, 1)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[Tensor, ...]]] = {
    "mlp": (mlp, (normal(32, 16),)),
    "convolutional": (convolutional, (normal(2, 3, 16, 16),)),
    "transformer": (lambda: nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), (normal(2, 5, 16),)),
    "recurrent": (rnn, (normal(2, 6, 8),)),
    "regions": (lambda: Model(regions, enter=nn.Linear(16, 16), leave=nn.Linear(16, 4)), (normal(4, 16),)),
    "attribute": (Attribute, (normal(4, 8),)),
    "cells": (decoder, (normal(2, 3, 8),)),
    "unfolded": (lambda: Model(unfolded, place=nn.Linear(8, 6), mix=nn.Linear(8, 8)), (normal(4, 8),)),
    "lengths": (lambda: Model(lengths, layer=nn.Linear(8, 8)), (torch.tensor([2, 3]), normal(2, 4, 8))),
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


# Models that are on GPUs already: on one, or spread over two as their authors or a device map spread them.


class Halves(nn.Module):
    """Its author moves values from one device to the other, and back."""

    def __init__(self, first: Any = "cpu", second: Any = "cpu") -> None:
        super().__init__()
        self.enter, self.inside = nn.Linear(8, 16).to(first), nn.Sequential(nn.Linear(16, 16), nn.GELU()).to(second)
        self.leave = nn.Linear(16, 4).to(first)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.enter(x.to(self.enter.weight.device)).relu()
        inside = self.inside(hidden.to(self.inside[0].weight.device))
        return self.leave(hidden + inside.to(hidden.device)).softmax(-1)


def fixed() -> nn.Module:
    """Names the device of its second layer."""
    return Model(
        lambda m, x: m.leave(m.enter(x).to("pretend:1")),
        enter=nn.Linear(8, 8).to("pretend:0"),
        leave=nn.Linear(8, 4).to("pretend:1"),
    )


def packed() -> nn.Module:
    """Lengths that torch takes on the CPU alone."""
    return Model(
        lambda m, x, lengths: m.over(pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False))[1][0],
        over=nn.GRU(4, 8, batch_first=True),
    )


def mapped(model: nn.Module, places: dict[str, str]) -> nn.Module:
    """A device map by child: parameters there, and calls with their tensors moved there, as `accelerate` wraps forwards."""
    for name, place in places.items():
        child = model.get_submodule(name).to(place)
        child.forward = _there(child.forward, torch.device(place))  # type: ignore[method-assign]
    return model


def _there(forward: Any, place: torch.device) -> Any:
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = pytree.tree_map_only(torch.Tensor, lambda x: x.to(place), (args, kwargs))
        return forward(*args, **kwargs)

    return wrapped
