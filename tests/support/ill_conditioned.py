"""A Llama whose attention is so sharp that its softmax saturates: there first order says up to ten times too much."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, HEADS, LAYERS, WORDS = 48, 4, 4, 64
SHARPNESS = 10.0


class RMSNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self.weight


def rotated(x: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat((-b, a), -1)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        for projection in (self.q_proj, self.k_proj):
            nn.init.normal_(projection.weight, std=SHARPNESS / math.sqrt(WIDTH))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = (
            project(x).view(b, t, HEADS, d // HEADS).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = q * cos + rotated(q) * sin, k * cos + rotated(k) * sin
        weights = (q @ k.transpose(-1, -2) / math.sqrt(d // HEADS)).masked_fill(mask, -1e4).softmax(-1)
        return self.o_proj((weights @ v).transpose(1, 2).reshape(b, t, d))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.down = nn.Linear(3 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn_norm, self.attn, self.mlp_norm, self.mlp = RMSNorm(), Attention(), RMSNorm(), Mlp()

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        x = x + self.attn(self.attn_norm(x), cos, sin, mask)
        return x + self.mlp(self.mlp_norm(x))


class SharpLlama(nn.Module):
    """Inputs: `tokens`, int64 [batch, length]."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm, self.head = RMSNorm(), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        length, half = tokens.shape[1], WIDTH // HEADS // 2
        angles = torch.outer(torch.arange(length).float(), 10000 ** (-torch.arange(half) / half))
        angles = torch.cat((angles, angles), -1)
        mask = torch.ones(length, length, dtype=torch.bool).triu(1)
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, angles.cos(), angles.sin(), mask)
        return self.head(self.norm(x))


def some_tokens(batch: int = 4, length: int = 24) -> Tensor:
    """Words drawn from a generator of their own."""
    return torch.randint(0, WORDS, (batch, length), generator=torch.Generator().manual_seed(0))
