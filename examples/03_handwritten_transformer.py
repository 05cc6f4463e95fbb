"""A character-level language model written by hand (RMSNorm, rotary positions, SwiGLU, causal attention), trained on
Python's help topics and scikit-learn's dataset descriptions.

Held out: 2.30 bits per character, next-character accuracy 0.570.
"""

import math
from pathlib import Path

import torch
from safetensors.torch import load_file, load_model
from torch import Tensor, nn

HERE = Path(__file__).resolve().parent
VOCABULARY = "\n" + "".join(map(chr, range(32, 127)))


def encode(text: str) -> Tensor:
    """Token ids [length]; characters outside the vocabulary are dropped."""
    index = {character: i for i, character in enumerate(VOCABULARY)}
    return torch.tensor([index[c] for c in text if c in index])


def decode(tokens: Tensor) -> str:
    return "".join(VOCABULARY[i] for i in tokens.tolist())


class RMSNorm(nn.Module):
    def __init__(self, dim: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


class RotaryEmbedding(nn.Module):
    """Cosines and sines of the position angles."""

    inv_freq: Tensor

    def __init__(self, dim: int, base: float = 10000.0) -> None:
        super().__init__()
        inv_freq = base ** -(torch.arange(0, dim, 2).float() / dim)
        self.register_buffer("inv_freq", inv_freq, persistent=False)

    def forward(self, length: int) -> tuple[Tensor, Tensor]:
        positions = torch.arange(length, device=self.inv_freq.device).type_as(self.inv_freq)
        angles = torch.outer(positions, self.inv_freq)  # [t, d/2]
        angles = torch.cat((angles, angles), dim=-1)  # [t, d]
        return angles.cos(), angles.sin()


def rotate_half(x: Tensor) -> Tensor:
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat((-x2, x1), dim=-1)


class CausalAttention(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q_proj = nn.Linear(dim, dim, bias=False)
        self.k_proj = nn.Linear(dim, dim, bias=False)
        self.v_proj = nn.Linear(dim, dim, bias=False)
        self.o_proj = nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = (
            project(x).view(b, t, self.heads, d // self.heads).transpose(1, 2)  # [b, h, t, d/h]
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        q = q * cos + rotate_half(q) * sin
        k = k * cos + rotate_half(k) * sin
        scores = q @ k.transpose(-2, -1) / math.sqrt(d // self.heads)  # [b, h, t, t]
        scores = scores.masked_fill(mask, -1e9)
        out = scores.softmax(dim=-1) @ v
        return self.o_proj(out.transpose(1, 2).reshape(b, t, d))


class SwiGLU(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(dim, hidden, bias=False)
        self.up_proj = nn.Linear(dim, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    def __init__(self, dim: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.input_norm = RMSNorm(dim)
        self.attention = CausalAttention(dim, heads)
        self.post_attention_norm = RMSNorm(dim)
        self.mlp = SwiGLU(dim, hidden)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        x = x + self.attention(self.input_norm(x), cos, sin, mask)
        return x + self.mlp(self.post_attention_norm(x))


class CharacterLM(nn.Module):
    """Token ids [n, t] -> logits of the next token [n, t, vocabulary]."""

    def __init__(self, dim: int = 64, depth: int = 4, heads: int = 4, hidden: int = 160) -> None:
        super().__init__()
        self.embed = nn.Embedding(len(VOCABULARY), dim)
        nn.init.normal_(self.embed.weight, std=0.02)
        self.rotary = RotaryEmbedding(dim // heads)
        self.layers = nn.ModuleList(DecoderLayer(dim, heads, hidden) for _ in range(depth))
        self.norm = RMSNorm(dim)
        self.lm_head = nn.Linear(dim, len(VOCABULARY), bias=False)
        self.lm_head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        t = tokens.shape[1]
        cos, sin = self.rotary(t)
        mask = torch.ones(t, t, dtype=torch.bool, device=tokens.device).triu(1)
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, cos, sin, mask)
        return self.lm_head(self.norm(x))


def get_model() -> nn.Module:
    model = CharacterLM()
    load_model(model, str(HERE / "weights" / "03_handwritten_transformer.safetensors"))
    return model.eval()


def get_inputs() -> tuple[Tensor, ...]:
    return (load_file(HERE / "data" / "help_text.safetensors")["inputs"].long(),)


def get_eval_inputs() -> list[tuple[Tensor, ...]]:
    return [(batch.long(),) for batch in load_file(HERE / "data" / "help_text.safetensors")["eval"].split(32)]


def loss_fn(logits: Tensor, following: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), following.flatten())


def get_targets() -> tuple[Tensor, ...]:
    return (load_file(HERE / "data" / "help_text.safetensors")["inputs_labels"].long(),)
