"""Sums and statistics: scaled afterwards, running, by difference, over long axes, one after another."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.rules.case import Case, on, raised, ramp


def pooled(x: Tensor) -> Tensor:
    return x.sum(1) / 64.0


def pooled_by_factor(x: Tensor) -> Tensor:
    return x.sum((1, 2), keepdim=True).squeeze() * (1 / 128)


def variance(x: Tensor) -> Tensor:
    mean = x.mean(-1, keepdim=True)
    return (x * x).mean(-1, keepdim=True) - mean * mean


def variance_of_squares(x: Tensor) -> Tensor:
    return x.square().mean(0) - x.mean(0).pow(2)


def variance_in_two_passes(x: Tensor) -> Tensor:
    return (x - x.mean(-1, keepdim=True)).pow(2).mean(-1)


def energy(x: Tensor) -> Tensor:
    return torch.log(torch.exp(x).sum(-1))


def energy_guarded(x: Tensor) -> Tensor:
    return torch.log(x.exp().mean(-1) + 1e-3)


def energy_shifted(x: Tensor) -> Tensor:
    top = x.amax(-1, keepdim=True)
    return torch.log(torch.exp(x - top).sum(-1)) + top.squeeze(-1)


def length(x: Tensor) -> Tensor:
    return torch.sqrt((x * x).sum(-1))


def length_guarded(x: Tensor) -> Tensor:
    return (x.pow(2).sum(-1, keepdim=True) + 1e-3) ** 0.5


class Stream(nn.Module):
    """A residual stream of `depth` blocks without weights, each of which adds `step` of what tanh gives."""

    def __init__(self, depth: int, step: float = 1e-3) -> None:
        super().__init__()
        self.depth, self.step = depth, step

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.depth):
            x = x + self.step * x.tanh()
        return x.exp()


def average(x: Tensor, y: Tensor) -> Tensor:
    for _ in range(12):
        x = x * 0.999 + y * 1e-3
    return x


def stream_upcast(x: Tensor) -> Tensor:
    h = x.float()
    for _ in range(12):
        h = h + 1e-3 * h.tanh()
    return h.to(x.dtype)


class Decoder(nn.Module):
    """A GPT-2 of eight small layers: pre-norm, residual stream, weights as it draws them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.places = nn.Embedding(32, 16), nn.Embedding(8, 16)
        layers = [nn.TransformerEncoderLayer(16, 2, 64, 0, "gelu", batch_first=True, norm_first=True) for _ in range(8)]
        self.layers, self.norm = nn.ModuleList(layers), nn.LayerNorm(16)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.words(tokens) + self.places(torch.arange(tokens.shape[1]))
        for layer in self.layers:
            h = layer(h)
        return self.norm(h) @ self.words.weight.t()


def separate(x: Tensor) -> list[Tensor]:
    return [x + factor * x.tanh() for factor in range(2, 20)]


LARGE = torch.full((2, 4), 1000.0)

CASES = (
    Case("pooled", *on(pooled, ramp(2, 64, 4)), {"RED001": {"sum_1"}}, ("RED002", "RED003", "RED007")),
    Case("pooled by a factor", *on(pooled_by_factor, ramp(2, 16, 8)), {"RED001": {"sum_1"}}),
    Case("pooled few", *on(pooled, ramp(2, 32, 4)), {}, ("RED001",)),
    Case("pooled, upcast", *on(raised(pooled), ramp(2, 64, 4)), {}, ("RED001",)),
    Case("mean", *on(lambda x: x.mean(1), ramp(2, 64, 4)), {}, ("RED001", "RED002")),
    # 64 * 2000 = 128000 > 65504
    Case("pooled, large", *on(pooled, torch.full((1, 64, 2), 2000.0)), {"RED001": {"sum_1"}}, ("RED002",)),
    # 20 ** 4 = 160000
    Case("large product", *on(lambda x: x.prod(-1), torch.full((1, 4), 20.0)), {"RED002": {"prod"}}),
    Case("large total", *on(lambda x: x.cumsum(-1), torch.full((1, 8), 9000.0)), {"RED002": {"cumsum"}}),
    Case("large total, upcast", *on(raised(pooled), torch.full((1, 64, 2), 2000.0)), {}, ("RED002",)),
    Case("cumsum", *on(lambda x: x.cumsum(-1), ramp(2, 256)), {"RED003": {"cumsum"}}),
    Case("cumprod", *on(lambda x: x.cumprod(0), ramp(300, 2)), {"RED003": {"cumprod"}}),
    Case("short cumsum", *on(lambda x: x.cumsum(-1), ramp(300, 2)), {}, ("RED003",)),
    Case("cumsum in float32", *on(lambda x: torch.cumsum(x, -1, dtype=torch.float32), ramp(2, 256)), {}, ("RED003",)),
    Case("variance by difference", *on(variance, ramp(2, 8)), {"RED004": {"sub"}}),
    # the mean square is 10000, the variance 0.3 ** 2: 17 bits cancel
    Case("small variance", *on(variance, 100 + ramp(2, 8, scale=0.3)), {"RED004": {"sub"}}, ("RED009",)),
    Case("variance of squares", *on(variance_of_squares, ramp(2, 8)), {"RED004": {"sub"}}),
    Case("variance, upcast", *on(raised(variance), ramp(2, 8)), {}, ("RED004",)),
    Case("variance in two passes", *on(variance_in_two_passes, ramp(2, 8)), {}, ("RED004",)),
    Case("log of sum of exp", *on(energy, ramp(2, 8)), {"RED005": {"exp"}}),
    Case("log of mean of exp, guarded", *on(energy_guarded, ramp(2, 8)), {"RED005": {"exp"}}),
    Case("log of sum of exp, shifted", *on(energy_shifted, ramp(2, 8)), {}, ("RED005",)),
    Case("logsumexp", *on(lambda x: x.logsumexp(-1), ramp(2, 8)), {}, ("RED005", "RED007")),
    Case("length", *on(length, ramp(2, 8)), {"RED006": {"mul"}}),
    Case("length, guarded", *on(length_guarded, ramp(2, 8)), {"RED006": {"pow_1"}}),
    Case("length, upcast", *on(raised(length), ramp(2, 8)), {}, ("RED006",)),
    Case("native length", *on(lambda x: torch.linalg.vector_norm(x, dim=-1), ramp(2, 8)), {}, ("RED006",)),
    Case("long mean", *on(lambda x: x.mean(-1), ramp(2, 5000)), {"RED007": {"mean"}}),
    Case("long variance", *on(lambda x: x.var(), ramp(2, 2049)), {"RED007": {"var"}}),
    Case("longest short mean", *on(lambda x: x.mean(-1), ramp(2, 4096)), {}, ("RED007",)),
    # at 1 BF16 numbers are 1/128 apart: 12 updates of 0.76e-3 come to 1.2 spacings, each below half of one
    Case("stream of 12", lambda: Stream(12), (ramp(2, 4),), {"RED008": {"add_11"}}),
    Case("moving average", *on(average, ramp(2, 4), ramp(4, 2).reshape(2, 4)), {"RED008": {"add_11"}}),
    Case("stream of 11", lambda: Stream(11), (ramp(2, 4),), {}, ("RED008",)),
    Case("stream of large updates", lambda: Stream(16, 1.0), (ramp(2, 4),), {}, ("RED008",)),
    Case("stream of vanishing updates", lambda: Stream(16, 1e-06), (ramp(2, 4),), {}, ("RED008",)),
    Case("a clean decoder of eight layers", Decoder, (torch.arange(8)[None],), {}, ("RED008",)),
    Case("stream, upcast", *on(stream_upcast, ramp(2, 4)), {}, ("RED008",)),
    Case("additions side by side", *on(separate, ramp(2, 4)), {}, ("RED008",)),
    # 1000 against 1: log2(1000) = 9.97 bits
    Case("close numbers", *on(lambda x, y: x - y, LARGE, LARGE - 1), {"RED009": {"sub"}}),
    Case("opposite numbers", *on(lambda x, y: x + y, LARGE, 2 - LARGE), {"RED009": {"add"}}),
    Case("distant numbers", *on(lambda x, y: x - y, LARGE, LARGE / 2), {}, ("RED009",)),
    Case("close numbers, upcast", *on(lambda x, y: x.float() - y.float(), LARGE, LARGE - 1), {}, ("RED009",)),
)
