"""A denoiser: timestep embedding, residual blocks with FiLM, self-attention, down- and up-sampling, one DDIM step."""

import math

import torch
import torch.nn.functional as F
from torch import nn


class ResBlock(nn.Module):
    def __init__(self, width_in, width, time):
        super().__init__()
        self.norm1 = nn.GroupNorm(4, width_in)
        self.conv1 = nn.Conv2d(width_in, width, 3, padding=1)
        self.time = nn.Linear(time, 2 * width)
        self.norm2 = nn.GroupNorm(4, width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1)
        self.skip = nn.Conv2d(width_in, width, 1) if width_in != width else nn.Identity()

    def forward(self, x, emb):
        h = self.conv1(F.silu(self.norm1(x)))
        scale, shift = self.time(F.silu(emb))[..., None, None].chunk(2, 1)
        h = self.norm2(h) * (1 + scale) + shift
        h = self.conv2(F.silu(h))
        return self.skip(x) + h


class SelfAttention(nn.Module):
    def __init__(self, width, heads=2):
        super().__init__()
        self.heads = heads
        self.norm = nn.GroupNorm(4, width, eps=1e-6)
        self.qkv = nn.Conv1d(width, 3 * width, 1)
        self.out = nn.Conv1d(width, width, 1)

    def forward(self, x):
        n, c, h, w = x.shape
        y = self.norm(x).reshape(n, c, h * w)
        q, k, v = self.qkv(y).reshape(n * self.heads, 3 * c // self.heads, h * w).chunk(3, 1)
        scale = (c // self.heads) ** -0.25
        weights = torch.einsum("bct,bcs->bts", q * scale, k * scale).softmax(-1)
        y = torch.einsum("bts,bcs->bct", weights, v).reshape(n, c, h * w)
        return x + self.out(y).reshape(n, c, h, w)


class Denoiser(nn.Module):
    def __init__(self, width=16, time=32, classes=4):
        super().__init__()
        self.width = width
        self.embed = nn.Sequential(nn.Linear(width, time), nn.SiLU(), nn.Linear(time, time))
        self.label = nn.Embedding(classes, time)
        self.enter = nn.Conv2d(3, width, 3, padding=1)
        self.down1 = ResBlock(width, width, time)
        self.shrink = nn.Conv2d(width, width, 3, stride=2, padding=1)
        self.middle1 = ResBlock(width, 2 * width, time)
        self.attention = SelfAttention(2 * width)
        self.middle2 = ResBlock(2 * width, width, time)
        self.grow = nn.Conv2d(width, width, 3, padding=1)
        self.up1 = ResBlock(2 * width, width, time)
        self.norm = nn.GroupNorm(4, width)
        self.leave = nn.Conv2d(width, 3, 3, padding=1)
        betas = torch.linspace(1e-4**0.5, 0.02**0.5, 100, dtype=torch.float64) ** 2
        self.register_buffer("alphas", torch.cumprod(1 - betas, 0).float())

    def timestep(self, t):
        half = self.width // 2
        frequencies = torch.exp(-math.log(10000) * torch.arange(half) / half)
        angles = t[:, None].float() * frequencies[None]
        return torch.cat([angles.cos(), angles.sin()], -1)

    def forward(self, x, t, label):
        emb = self.embed(self.timestep(t))
        emb = emb + self.label(label)
        h0 = self.enter(x)
        h1 = self.down1(h0, emb)
        h = self.middle1(self.shrink(h1), emb)
        h = self.attention(h)
        h = self.middle2(h, emb)
        h = self.grow(F.interpolate(h, scale_factor=2, mode="nearest"))
        h = self.up1(torch.cat([h, h1], 1), emb)
        noise = self.leave(F.silu(self.norm(h)))
        alpha = self.alphas[t].view(-1, 1, 1, 1)
        earlier = self.alphas[t - 10].view(-1, 1, 1, 1)
        clean = (x - (1 - alpha).sqrt() * noise) / alpha.sqrt()
        clean = clean.clamp(-3, 3)
        return earlier.sqrt() * clean + (1 - earlier).sqrt() * noise


def build():
    torch.manual_seed(7)
    model = Denoiser()
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data.add_(0.1 * torch.randn(parameter.shape))
    return model.eval()


def inputs():
    generator = torch.Generator().manual_seed(3)
    return torch.randn(2, 3, 12, 12, generator=generator), torch.tensor([35, 80]), torch.tensor([1, 3])
