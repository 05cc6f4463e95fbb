"""A small diffusion U-Net: a sinusoidal embedding of the time, residual blocks, attention, skips that are concatenated."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Time(nn.Module):
    """Angles are made in FP32 from whole numbers, whatever the model is stored in."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.SiLU(), nn.Linear(4 * width, 4 * width))

    def forward(self, t: Tensor) -> Tensor:
        half = self.width // 2
        angles = t[:, None].float() * torch.exp(-math.log(10_000) * torch.arange(half, device=t.device) / half)
        return self.mlp(torch.cat([angles.sin(), angles.cos()], -1))


class Block(nn.Module):
    def __init__(self, before: int, after: int, time: int) -> None:
        super().__init__()
        self.n1, self.c1 = nn.GroupNorm(4, before), nn.Conv2d(before, after, 3, padding=1)
        self.t = nn.Linear(time, after)
        self.n2, self.c2 = nn.GroupNorm(4, after), nn.Conv2d(after, after, 3, padding=1)
        self.skip = nn.Conv2d(before, after, 1) if before != after else nn.Identity()

    def forward(self, x: Tensor, embedded: Tensor) -> Tensor:
        h = self.c1(F.silu(self.n1(x))) + self.t(F.silu(embedded))[:, :, None, None]
        return self.c2(F.silu(self.n2(h))) + self.skip(x)


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.n, self.qkv, self.o = nn.GroupNorm(4, width), nn.Conv2d(width, 3 * width, 1), nn.Conv2d(width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        b, c, h, w = x.shape
        q, k, v = self.qkv(self.n(x)).reshape(b, 3, c, h * w).transpose(-1, -2).unbind(1)
        mixed = F.scaled_dot_product_attention(q, k, v)  # [b, h w, c]
        return x + self.o(mixed.transpose(-1, -2).reshape(b, c, h, w))


class UNet(nn.Module):
    """Images [b, 3, h, w] and whole times [b] in; h and w are divisible by 4."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        time = 4 * width
        self.time, self.inp = Time(width), nn.Conv2d(3, width, 3, padding=1)
        self.down = nn.ModuleList([Block(width, width, time), Block(width, 2 * width, time)])
        self.mid1, self.attn = Block(2 * width, 2 * width, time), Attention(2 * width)
        self.mid2 = Block(2 * width, 2 * width, time)
        self.up = nn.ModuleList([Block(4 * width, 2 * width, time), Block(3 * width, width, time)])
        self.norm, self.out = nn.GroupNorm(4, width), nn.Conv2d(width, 3, 3, padding=1)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        embedded, h, skips = self.time(t), self.inp(x), []
        for block in self.down:
            h = block(h, embedded)
            skips.append(h)
            h = F.avg_pool2d(h, 2)
        h = self.mid2(self.attn(self.mid1(h, embedded)), embedded)
        for block in self.up:
            h = F.interpolate(h, scale_factor=2.0, mode="nearest")
            h = block(torch.cat([h, skips.pop()], 1), embedded)
        return self.out(F.silu(self.norm(h)))
