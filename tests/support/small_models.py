"""Small models that between them hold most of what decides a dtype; shared by the tests of resolve, solve and patch."""

from collections.abc import Callable
from functools import reduce
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.replaying import Model
from tests.support.subjects import normal


class RmsNorm(nn.Module):
    """Raised by hand, and handed back in the dtype that came in."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        raised = x.float()
        normed = raised * torch.rsqrt(raised.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * normed.to(x.dtype)


class Attention(nn.Module):
    """By hand, with a causal mask and a rotary table as buffers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        angles = torch.arange(8)[:, None] / torch.tensor([1.0, 10.0])
        self.register_buffer("cos", torch.cat([angles.cos()] * (width // 2), -1)[:, :width])
        self.register_buffer("mask", torch.ones(8, 8).triu(1).bool())

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        q = q * self.cos[:length]
        scores = q @ k.transpose(-1, -2) / 4
        scores = scores.masked_fill(self.mask[:length, :length], -1e4)
        return self.out(F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype) @ v)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.attention, self.mlp_norm = RmsNorm(width), Attention(width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.down(F.silu(self.up(self.mlp_norm(x))))


def tied(words: int, width: int, **body: nn.Module) -> nn.Module:
    """Tokens in; an embedding and a head share a weight, and the body lies between them."""
    embed, head = nn.Embedding(words, width), nn.Linear(width, words, bias=False)
    head.weight = embed.weight

    def forward(m: Any, tokens: Tensor) -> Tensor:
        return m.head(reduce(lambda x, name: getattr(m, name)(x), body, m.embed(tokens)))

    return Model(forward, embed=embed, **body, head=head)


def transformer() -> nn.Module:
    return tied(11, 8, blocks=nn.Sequential(Block(8), Block(8)), norm=RmsNorm(8))


def concatenated(m: Any, x: Tensor) -> Tensor:
    x = m.stem(x)
    x = torch.cat([x, m.body(x)], dim=1)
    return m.head(F.interpolate(x, scale_factor=0.5).mean((2, 3)))


def convnet() -> nn.Module:
    stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
    body = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.GroupNorm(2, 8), nn.GELU())
    return Model(concatenated, stem=stem, body=body, head=nn.Linear(16, 5))


class Mixture(nn.Module):
    """A router that picks experts, an FP32 region of the author's own, and two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(6, 3)
        self.experts = nn.ModuleList([nn.Linear(6, 6) for _ in range(3)])
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast("cpu", enabled=False):
            weights = self.router(x.float()).softmax(-1)
        chosen = weights.topk(2, -1)
        mixed = sum(expert(x) * weights[:, i : i + 1] for i, expert in enumerate(self.experts))
        total = mixed.cumsum(0) / (mixed.norm(dim=-1, keepdim=True) + 1)
        return torch.exp(-total.abs()) * self.scale + x, chosen.indices


class Mlp(nn.Module):
    """Plain, with a nested container and a loss-like tail."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Sequential(nn.LayerNorm(12), nn.Linear(12, 6)))
        self.gate = nn.PReLU()

    def forward(self, x: Tensor) -> Tensor:
        y = self.gate(self.layers(x)) + x
        return F.log_softmax(y, dim=-1) - y.logsumexp(-1, keepdim=True)


def without_autocast(m: Any, x: Tensor) -> Tensor:
    """Switches autocast off for one call of its layer, not for the other."""
    with torch.autocast("cpu", enabled=False):
        y = m.linear(x.float())
    return m.norm(y) + m.linear(x)


class Regions(nn.Module):
    """Regions around calls and inside them, a part called twice, and a layer that has two names."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.act = Model(without_autocast, linear=nn.Linear(6, 6), norm=nn.LayerNorm(6)), nn.GELU()
        self.body = nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.LayerNorm(6))
        self.other = nn.Sequential(self.body[0], nn.ReLU())

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast("cpu", enabled=False):
            y = self.inner(x)
        z = self.body(self.body(self.act(y)))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            w = (self.inner(z) + self.other(self.act(x))).exp_()  # what is written in place is left alone
        return w, z * w


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[Tensor, ...]]] = {
    "transformer": (transformer, (torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]]),)),
    "convnet": (convnet, (normal(2, 3, 8, 8),)),
    "mixture": (Mixture, (normal(4, 6),)),
    "mlp": (Mlp, (normal(4, 6),)),
}


class Deep(nn.Module):
    """Errors pile up: not all of it can be low."""

    def __init__(self, layers: int = 3, width: int = 256) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def narrowing() -> nn.Module:
    """x [8, 16] -> [8, 64] -> a view of it -> relu -> [8, 4]."""
    wide, narrow = nn.Linear(16, 64, bias=False), nn.Linear(64, 4, bias=False)
    return Model(lambda m, x: m.narrow(m.wide(x).reshape(8, 64).relu()), wide=wide, narrow=narrow)


def moody(layer: nn.Module, raises: bool) -> nn.Module:
    """Another model, or none, with gradients enabled."""

    def forward(m: Any, x: Tensor) -> Tensor:
        if torch.is_grad_enabled() and raises:
            raise KeyError("gradients")
        return m.layer(x) * (3.0 if torch.is_grad_enabled() else 1.0)

    return Model(forward, layer=layer)
