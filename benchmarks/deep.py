"""Models of many operations that cost little each: what an audit of them costs is what an operation costs the auditor."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.subjects import MODELS, Built, build, gpt, vit

WIDTH = 128


class Residual(nn.Module):
    """x + gelu(linear(norm(x))), four operations."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Shape [B, width] -> the same."""
        return x + F.gelu(self.linear(self.norm(x)))


class Flat(nn.Module):
    """A transformer with rotary positions, written in one forward over lists of weights: a single module."""

    def __init__(self, layers: int, width: int, heads: int = 4) -> None:
        super().__init__()
        shapes = dict.fromkeys("qkvo", (width, width)) | {"up": (4 * width, width), "down": (width, 4 * width)}
        self.layers, self.heads = layers, heads
        self.weights = nn.ModuleDict(
            {
                name: nn.ParameterList(
                    nn.Parameter(torch.randn(shape) * 0.5 / math.sqrt(shape[1])) for _ in range(layers)
                )
                for name, shape in shapes.items()
            }
        )
        self.first, self.second = (nn.ParameterList(torch.ones(width) for _ in range(layers)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """Shape [B, T, width] -> the same."""
        batch, tokens, width = x.shape
        size = width // self.heads
        mask = torch.full((tokens, tokens), -torch.inf).triu(1)
        angles = torch.arange(tokens)[:, None] / 10_000 ** (torch.arange(0, size, 2) / size)
        cos, sin = angles.cos(), angles.sin()

        def rotated(x: Tensor) -> Tensor:
            a, b = x[..., ::2], x[..., 1::2]
            return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)

        for layer in range(self.layers):
            read = {name: weights[layer].T for name, weights in self.weights.items()}
            seen = _rms_norm(x, self.first[layer])
            q, k, v = ((seen @ read[name]).view(batch, tokens, self.heads, size).transpose(1, 2) for name in "qkv")
            found = torch.softmax(rotated(q) @ rotated(k).transpose(-1, -2) / math.sqrt(size) + mask, -1) @ v
            x = x + found.transpose(1, 2).reshape(batch, tokens, width) @ read["o"]
            hidden = _rms_norm(x, self.second[layer]) @ read["up"]
            x = x + (hidden * torch.sigmoid(1.702 * hidden)) @ read["down"]
        return x


def _rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight


class Selective(nn.Module):
    """The mixer of a Mamba, its recurrence a loop in Python."""

    def __init__(self, width: int, states: int = 16) -> None:
        super().__init__()
        inner = 2 * width
        self.norm, self.into, self.out = nn.LayerNorm(width), nn.Linear(width, 2 * inner), nn.Linear(inner, width)
        self.mix = nn.Conv1d(inner, inner, 4, groups=inner, padding=3)
        self.select, self.step = nn.Linear(inner, 8 + 2 * states), nn.Linear(8, inner)
        self.decay = nn.Parameter(torch.arange(1, states + 1).float().log().repeat(inner, 1))
        self.states = states

    def forward(self, x: Tensor) -> Tensor:
        """Shape [B, T, width] -> the same."""
        seen, gate = self.into(self.norm(x)).chunk(2, -1)
        tokens = seen.shape[1]
        seen = F.silu(self.mix(seen.transpose(1, 2))[..., :tokens]).transpose(1, 2)
        step, write, read = self.select(seen).split([8, self.states, self.states], -1)
        step = F.softplus(self.step(step))
        kept = torch.exp(-step[..., None] * self.decay.exp())
        added = step[..., None] * write[:, :, None] * seen[..., None]
        state, found = torch.zeros_like(kept[:, 0]), []
        for token in range(tokens):
            state = kept[:, token] * state + added[:, token]
            found.append((state * read[:, token, None]).sum(-1))
        return x + self.out(torch.stack(found, 1) * F.silu(gate))


class Block(nn.Module):
    """Two convolutions of a diffusion model with the time between them, and attention over the places."""

    def __init__(self, given: int, width: int, time: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.GroupNorm(8, n) for n in (given, width, width))
        self.first, self.second = (nn.Conv2d(n, width, 3, padding=1) for n in (given, width))
        self.time, self.skip = nn.Linear(time, width), nn.Conv2d(given, width, 1)
        self.read, self.out = nn.Conv2d(width, 3 * width, 1), nn.Conv2d(width, width, 1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        """Shape [B, given, H, W], [B, time] -> [B, width, H, W]."""
        seen = self.first(F.silu(self.norms[0](x))) + self.time(F.silu(time))[:, :, None, None]
        x = self.skip(x) + self.second(F.silu(self.norms[1](seen)))
        batch, width, *places = x.shape
        q, k, v = self.read(self.norms[2](x)).reshape(batch, 3, width, -1).unbind(1)
        weights = torch.softmax(q.transpose(1, 2) @ k * width**-0.5, -1)
        return x + self.out((v @ weights.transpose(1, 2)).reshape(batch, width, *places))


class UNet(nn.Module):
    """Down over four sizes and up again, each with as many blocks."""

    def __init__(self, blocks: int, width: int = 32) -> None:
        super().__init__()
        widths = [width * n for n in (1, 2, 3, 4)]
        self.embed, self.enter, self.leave = (
            nn.Linear(width, WIDTH),
            nn.Conv2d(3, width, 3, padding=1),
            nn.Conv2d(width, 3, 1),
        )
        self.down, self.up, skipped, given = nn.ModuleList(), nn.ModuleList(), [], width
        for out in widths:
            stage = nn.ModuleList()
            for _ in range(blocks):
                stage.append(Block(given, out, WIDTH))
                skipped.append(given := out)
            self.down.append(stage)
        for out in reversed(widths):
            stage = nn.ModuleList()
            for _ in range(blocks):
                stage.append(Block(given + skipped.pop(), out, WIDTH))
                given = out
            self.up.append(stage)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        """Shape [B, 3, H, W], [B, width] -> [B, 3, H, W]."""
        time, x, skipped = self.embed(time), self.enter(x), []
        for stage in self.down:
            for block in stage:  # type: ignore[attr-defined]
                skipped.append(x := block(x, time))
            x = F.avg_pool2d(x, 2)
        for stage in self.up:
            x = F.interpolate(x, scale_factor=2)
            for block in stage:  # type: ignore[attr-defined]
                x = block(torch.cat([x, skipped.pop()], 1), time)
        return self.leave(x)


class Cells(nn.Module):
    """A two-layer bidirectional GRU, written as a loop over cells."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.cells = nn.ModuleList(nn.GRUCell(width if layer == 0 else 2 * width, width) for layer in (0, 0, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        """Shape [T, B, width] -> [T, B, 2 width]."""
        for layer in (0, 2):
            ways = []
            for way, order in enumerate((range(len(x)), reversed(range(len(x))))):
                state, found = torch.zeros_like(x[0, :, : self.cells[0].hidden_size]), {}
                for step in order:
                    found[step] = state = self.cells[layer + way](x[step], state)
                ways.append(torch.stack([found[step] for step in range(len(x))]))
            x = torch.cat(ways, -1)
        return x


class Language(nn.Module):
    """Token embeddings, blocks and a head."""

    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.embed, self.blocks, self.head = nn.Embedding(256, WIDTH), nn.Sequential(*blocks), nn.Linear(WIDTH, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        """Shape [B, T] -> [B, T, 256]."""
        found: Tensor = self.head(self.blocks(self.embed(tokens)))
        return found


def _timm(name: str, size: int) -> Built:
    import timm

    return timm.create_model(name, pretrained=False), (torch.randn(1, 3, size, size),)


DEEP: dict[str, Callable[[], Built]] = {
    "GRU, 2 layers both ways, 1,000 steps": lambda: (
        nn.GRU(64, 64, 2, bidirectional=True),
        (torch.randn(1000, 4, 64),),
    ),
    "the same as a loop over cells": lambda: (Cells(64), (torch.randn(1000, 4, 64),)),
    "transformer in one module, 40 layers": lambda: (Flat(40, WIDTH), (torch.randn(8, 128, WIDTH),)),
    "U-Net, 4 x 2 x 9 blocks": lambda: (UNet(9), (torch.randn(2, 3, 32, 32), torch.randn(2, 32))),
    "Mamba, 6 layers, 64 steps in a loop": lambda: (
        Language([Selective(WIDTH) for _ in range(6)]),
        (torch.randint(0, 256, (16, 64)),),
    ),
    "densenet264d": partial(_timm, "densenet264d", 160),
    "tf_efficientnetv2_l": partial(_timm, "tf_efficientnetv2_l", 128),
    "vit, 24 layers": partial(vit, 24),
    "gpt2, 64 layers of width 128": partial(gpt, 64),
    "1,500 residual layers": lambda: (nn.Sequential(*(Residual(32) for _ in range(1500))), (torch.randn(4, 32),)),
}

DEPTHS = {f"gpt2, {layers} layers of width 128": partial(gpt, layers) for layers in (2, 4, 8, 16, 32, 64)}
ALL: dict[str, Callable[[], Built]] = {**DEEP, **DEPTHS, **MODELS}


def made(name: str) -> Built:
    """A model in eval mode and its arguments, the same every time."""
    if name in MODELS:
        return build(name)
    torch.manual_seed(0)
    model, args = ALL[name]()
    return model.eval(), args
