"""Models whose arithmetic is written in one forward, so that modules alone cannot tell it apart."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.subjects import normal

WIDTH, HEADS, LENGTH = 32, 2, 8


def _rotated(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


class FlatBlock(nn.Module):
    """A transformer block by hand: RMSNorm, rotary embedding, softmax and all products in one forward, in plain functions."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Parameter(torch.randn(3 * WIDTH, WIDTH) * WIDTH**-0.5)
        self.out = nn.Parameter(torch.randn(WIDTH, WIDTH) * WIDTH**-0.5)
        self.up = nn.Parameter(torch.randn(4 * WIDTH, WIDTH) * WIDTH**-0.5)
        self.down = nn.Parameter(torch.randn(WIDTH, 4 * WIDTH) * (4 * WIDTH) ** -0.5)
        self.scale = nn.Parameter(torch.ones(2, WIDTH))
        size = WIDTH // HEADS
        angles = torch.arange(LENGTH)[:, None] / 10000 ** (torch.arange(0, size, 2) / size)
        self.register_buffer("angles", torch.cat((angles, angles), dim=-1))

    def forward(self, x: Tensor) -> Tensor:
        normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.scale[0]
        size = WIDTH // HEADS
        q, k, v = (normed @ self.qkv.T).view(len(x), LENGTH, 3, HEADS, size).permute(2, 0, 3, 1, 4)
        cos, sin = self.angles.cos(), self.angles.sin()
        q, k = q * cos + _rotated(q) * sin, k * cos + _rotated(k) * sin
        scores = torch.exp(q @ k.transpose(-1, -2) / math.sqrt(size))
        mixed = (scores / scores.sum(-1, keepdim=True)) @ v
        x = x + F.linear(mixed.transpose(1, 2).reshape(x.shape), self.out)
        normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.scale[1]
        return F.linear(F.silu(F.linear(normed, self.up)), self.down)


LARGE = (400 * normal(2, LENGTH, WIDTH),)
"""Inputs whose squares are beyond FP16, as outlier channels of a trained model are."""


class Stack(nn.Module):
    """Flat blocks in a model that adds and scales around them, with a layer that is a module."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([FlatBlock(), FlatBlock()])
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x) * 0.5
        x -= x.mean(-1, keepdim=True)
        return self.head(F.relu(x, inplace=True) / 400)
