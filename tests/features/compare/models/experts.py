"""A language model of experts: rotary grouped-query attention, RMS norms, a router of the best two, a shared expert."""

import torch
import torch.nn.functional as F
from torch import nn


class RMSNorm(nn.Module):
    def __init__(self, width, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x):
        square = x.float().pow(2).mean(-1, keepdim=True)
        x = x * torch.rsqrt(square + self.eps)
        return x * self.weight


def rotate(x):
    left, right = x.chunk(2, -1)
    return torch.cat([-right, left], -1)


class Attention(nn.Module):
    def __init__(self, width, heads=4, groups=2):
        super().__init__()
        self.heads, self.groups, self.size = heads, groups, width // heads
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, groups * self.size, bias=False)
        self.v = nn.Linear(width, groups * self.size, bias=False)
        self.o = nn.Linear(width, width, bias=False)

    def forward(self, x, cos, sin, mask):
        n, t, _ = x.shape
        q = self.q(x).view(n, t, self.heads, self.size).transpose(1, 2)
        k = self.k(x).view(n, t, self.groups, self.size).transpose(1, 2)
        v = self.v(x).view(n, t, self.groups, self.size).transpose(1, 2)
        q = q * cos + rotate(q) * sin
        k = k * cos + rotate(k) * sin
        k = k.repeat_interleave(self.heads // self.groups, 1)
        v = v.repeat_interleave(self.heads // self.groups, 1)
        scores = q @ k.transpose(2, 3) * self.size**-0.5
        scores = 30.0 * torch.tanh(scores / 30.0)
        weights = (scores + mask).softmax(-1)
        y = (weights @ v).transpose(1, 2).reshape(n, t, -1)
        return self.o(y)


class Expert(nn.Module):
    def __init__(self, width, hidden):
        super().__init__()
        self.w1 = nn.Linear(width, hidden, bias=False)
        self.w2 = nn.Linear(hidden, width, bias=False)
        self.w3 = nn.Linear(width, hidden, bias=False)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Mixture(nn.Module):
    def __init__(self, width, experts=6, best=2):
        super().__init__()
        self.best = best
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(Expert(width, 2 * width) for _ in range(experts))
        self.shared = Expert(width, width)
        self.shared_gate = nn.Linear(width, 1)

    def forward(self, x):
        flat = x.flatten(0, 1)
        probabilities = self.router(flat).softmax(-1)
        weights, chosen = probabilities.topk(self.best, -1)
        weights = weights / weights.sum(-1, keepdim=True)
        result = torch.zeros_like(flat)
        for index, expert in enumerate(self.experts):
            rows, place = torch.where(chosen == index)
            out = expert(flat[rows]) * weights[rows, place, None]
            result = result.index_add(0, rows, out)
        gate = torch.sigmoid(self.shared_gate(flat))
        result = result + gate * self.shared(flat)
        return result.view_as(x)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm1, self.norm2 = RMSNorm(width), RMSNorm(width)
        self.attention, self.mixture = Attention(width), Mixture(width)

    def forward(self, x, cos, sin, mask):
        x = x + self.attention(self.norm1(x), cos, sin, mask)
        return x + self.mixture(self.norm2(x))


class Model(nn.Module):
    def __init__(self, tokens=50, width=32, layers=2):
        super().__init__()
        self.embed = nn.Embedding(tokens, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm = RMSNorm(width)
        self.size = width // 4

    def forward(self, tokens):
        t = tokens.shape[1]
        x = self.embed(tokens) * self.embed.embedding_dim**0.5
        rates = 10000.0 ** (-torch.arange(0, self.size, 2) / self.size)
        angles = torch.arange(t)[:, None] * rates
        angles = torch.cat([angles, angles], -1)
        cos, sin = angles.cos(), angles.sin()
        mask = torch.full((t, t), float("-inf")).triu(1)
        for block in self.blocks:
            x = block(x, cos, sin, mask)
        return F.linear(self.norm(x), self.embed.weight)


def build():
    torch.manual_seed(11)
    model = Model()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data.uniform_(0.5, 1.5)
    model.embed.weight.data.mul_(0.2)
    return model.eval()


def inputs():
    return (torch.randint(0, 50, (2, 11), generator=torch.Generator().manual_seed(6)),)
