"""A Llama with four mistakes planted in it, each on a line of its own that every layer runs; each can be left out."""

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH, HEADS, VOCABULARY, LENGTH = 32, 4, 64, 12
MISTAKES = {"eps": 1e-16, "masked": -1e9, "sharp": 300.0, "loud": 100.0}
"""A guard that FP16 loses, a literal that it cannot hold, scores that rounding decides, an activation beyond its range."""
REPAIRED = {"eps": 1e-5, "masked": -1e4, "sharp": 0.35, "loud": 1.0}


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    mean = x.pow(2).mean(-1, keepdim=True)
    return x * torch.rsqrt(mean + eps) * weight  # planted: eps


class RMSNorm(nn.Module):
    def __init__(self, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(WIDTH)), eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class Attention(nn.Module):
    def __init__(self, masked: float, sharp: float) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.o_proj, self.masked, self.sharp = nn.Linear(WIDTH, WIDTH, bias=False), masked, sharp

    def forward(self, x: Tensor, future: Tensor) -> Tensor:
        q, k, v = (
            project(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        scores = q @ k.transpose(-2, -1) * self.sharp  # planted: sharp
        scores = scores.masked_fill(future, self.masked)  # planted: masked
        weights = torch.softmax(scores, dim=-1)
        return self.o_proj((weights @ v).transpose(1, 2).flatten(-2))


class MLP(nn.Module):
    def __init__(self, loud: float) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(WIDTH, 64, bias=False), nn.Linear(WIDTH, 64, bias=False)
        self.down_proj = nn.Linear(64, WIDTH, bias=False)
        with torch.no_grad():
            self.gate_proj.weight.mul_(loud)
            self.up_proj.weight.mul_(loud)
            self.down_proj.weight.div_(10 * loud**2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.silu(self.gate_proj(x)) * self.up_proj(x) * 10  # planted: loud
        return self.down_proj(hidden)


class Layer(nn.Module):
    def __init__(self, eps: float, masked: float, sharp: float, loud: float) -> None:
        super().__init__()
        self.attn_norm, self.attn = RMSNorm(eps), Attention(masked, sharp)
        self.mlp_norm, self.mlp = RMSNorm(eps), MLP(loud)

    def forward(self, x: Tensor, future: Tensor) -> Tensor:
        x = x + self.attn(self.attn_norm(x), future)
        return x + self.mlp(self.mlp_norm(x))


class Llama(nn.Module):
    """Tokens in; the first of each row is padding, whose embedding is zero."""

    def __init__(self, layers: int = 3, **planted: float) -> None:
        super().__init__()
        given = {**MISTAKES, **planted}
        self.embed = nn.Embedding(VOCABULARY, WIDTH, padding_idx=0)
        self.layers = nn.ModuleList(Layer(**given) for _ in range(layers))
        self.norm, self.head = RMSNorm(1e-5), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        future = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool).triu(1)
        for layer in self.layers:
            x = layer(x, future)
        return self.head(self.norm(x))


def llama(layers: int = 3, **planted: float) -> tuple[Llama, tuple[Tensor]]:
    """The model with some of its mistakes changed, weights the same whichever, and its input."""
    torch.manual_seed(0)
    tokens = torch.randint(1, VOCABULARY, (2, LENGTH))
    tokens[:, 0] = 0
    return Llama(layers, **planted).eval(), (tokens,)


def line(planted: str) -> str:
    """`planted.py:42`: where a mistake stands."""
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    number = next(i for i, text in enumerate(lines, 1) if text.endswith(f"# planted: {planted}"))
    return f"planted.py:{number}"
