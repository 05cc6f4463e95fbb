"""Parts that random models are drawn from: each takes a float tensor of rows eight wide and returns another."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

WIDTH = 8
Part = Callable[[Tensor], Tensor]
Make = Callable[[int], Part]
"""Makes a part; the number picks one of a few variants."""

MODULES: dict[str, Make] = {}
FUNCTIONS: dict[str, Make] = {}
PYTHON: dict[str, Make] = {}
WRITES: dict[str, Make] = {}
STATE: dict[str, Make] = {}
DTYPES: dict[str, Make] = {}
SCALES: dict[str, Make] = {}


def kept(table: dict[str, Make]) -> Callable[[Make], Make]:
    """Enters a part in a table, under the name of what makes it."""

    def enter(make: Make) -> Make:
        table[make.__name__] = make
        return make

    return enter


def plain(table: dict[str, Make]) -> Callable[[Part], Part]:
    """Enters a part that has no variants and no state."""

    def enter(part: Part) -> Part:
        table[part.__name__] = lambda k: part  # type: ignore[attr-defined]
        return part

    return enter


class Holding(nn.Module):
    """A function of a module and its input; what it holds is its own."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor], **held: Any) -> None:
        super().__init__()
        self.function = function
        for name, value in held.items():
            if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
                self.register_buffer(name, value)
            else:
                setattr(self, name, value)

    def forward(self, h: Tensor) -> Tensor:
        return self.function(self, h)


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


# modules of many kinds


@kept(MODULES)
def linears(k: int) -> Part:
    return [linear(), nn.Linear(8, 8, bias=False), nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))][k % 3]


@kept(MODULES)
def activations(k: int) -> Part:
    return [
        nn.GELU(),
        nn.SiLU(),
        nn.Softplus(),
        nn.PReLU(),
        nn.Softmax(-1),
        nn.LogSoftmax(-1),
        nn.Hardswish(),
        nn.Mish(),
    ][k]


@kept(MODULES)
def norms(k: int) -> Part:
    return [
        nn.LayerNorm(8),
        nn.RMSNorm(8),
        nn.BatchNorm1d(8),
        nn.BatchNorm1d(8, track_running_stats=False),
        nn.GroupNorm(2, 8),
        nn.InstanceNorm1d(4),
        nn.Sequential(nn.Unflatten(-1, (2, 4)), nn.LayerNorm((2, 4)), nn.Flatten(1)),
        nn.LayerNorm(8, elementwise_affine=False),
    ][k]


@kept(MODULES)
def convolutions(k: int) -> Part:
    conv: nn.Module = [
        nn.Conv1d(1, 1, 3, padding=1),
        nn.Sequential(nn.Conv1d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv1d(4, 1, 1)),
        nn.ConvTranspose1d(1, 1, 3, padding=1),
        nn.Sequential(nn.Conv1d(1, 4, 3, padding=1), nn.Conv1d(4, 4, 3, padding=1, groups=4), nn.Conv1d(4, 1, 1)),
    ][k % 4]
    return nn.Sequential(nn.Unflatten(-1, (1, 8)), conv, nn.Flatten(1))


@kept(MODULES)
def images(k: int) -> Part:
    inner: nn.Module = [
        nn.Conv2d(2, 2, 3, padding=1),
        nn.MaxPool2d(2, ceil_mode=True),
        nn.AdaptiveAvgPool2d(2),
        nn.Sequential(nn.BatchNorm2d(2), nn.ReLU()),
        nn.Upsample(scale_factor=2),
        nn.Sequential(nn.ReflectionPad2d(1), nn.Conv2d(2, 2, 3)),
        nn.Sequential(nn.Conv2d(2, 8, 1), nn.PixelShuffle(2)),
        nn.Sequential(nn.Conv2d(2, 2, 2), nn.Dropout2d(0.5)),
    ][k]

    def run(m: Any, h: Tensor) -> Tensor:
        pooled = F.adaptive_avg_pool2d(m.inner(h.reshape(len(h), 2, 2, 2)), 2)
        return pooled[:, :2].reshape(len(h), -1)[:, :8]

    return Holding(run, inner=inner)


@kept(MODULES)
def recurrent(k: int) -> Part:
    inner: nn.Module = [nn.GRU(8, 8), nn.LSTM(8, 8, batch_first=True), nn.RNN(8, 8), nn.LSTM(8, 4, bidirectional=True)][
        k % 4
    ]
    return Holding(lambda m, h: m.inner(h[None])[0][0], inner=inner)


@kept(MODULES)
def cells(k: int) -> Part:
    def run(m: Any, h: Tensor) -> Tensor:
        state = m.inner(h)
        for _ in range(2):
            state = m.inner(h, state)
        return state if isinstance(state, Tensor) else state[0]

    return Holding(run, inner=[nn.GRUCell(8, 8), nn.LSTMCell(8, 8)][k % 2])


@kept(MODULES)
def attention(k: int) -> Part:
    def run(m: Any, h: Tensor) -> Tensor:
        mask = torch.ones(len(h), len(h)).triu(1).bool() if k % 2 else None
        return m.inner(h[None], h[None], h[None], attn_mask=mask, need_weights=k % 4 > 1)[0][0]

    return Holding(run, inner=nn.MultiheadAttention(8, 2, batch_first=True))


@kept(MODULES)
def transformer(k: int) -> Part:
    inner = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=bool(k % 2))
    return Holding(lambda m, h: m.inner(h[None])[0], inner=inner)


@kept(MODULES)
def embeddings(k: int) -> Part:
    def run(m: Any, h: Tensor) -> Tensor:
        ids = h.detach().argmax(-1)
        return h + (m.table(ids[:, None]) if isinstance(m.table, nn.EmbeddingBag) else m.table(ids))

    table = [
        nn.Embedding(8, 8),
        nn.Embedding(8, 8, padding_idx=0),
        nn.EmbeddingBag(8, 8),
        nn.Embedding(8, 8, max_norm=1.0),
    ]
    return Holding(run, table=table[k % 4])


@kept(MODULES)
def parametrised(k: int) -> Part:
    make: list[Callable[[], nn.Module]] = [
        lambda: parametrizations.weight_norm(linear()),
        lambda: parametrizations.spectral_norm(linear()),
        lambda: parametrizations.orthogonal(linear()),
        lambda: nn.utils.parametrize.register_parametrization(linear(), "weight", nn.Tanh()),
    ]
    return make[k % 4]()


@kept(MODULES)
def containers(k: int) -> Part:
    if k % 3 == 0:
        return Holding(
            lambda m, h: functools.reduce(lambda y, f: f(y), m.parts, h), parts=nn.ModuleList([linear(), nn.Tanh()])
        )
    if k % 3 == 1:
        parts = nn.ModuleDict({"a.b".replace(".", "_"): linear(), "relu": nn.ReLU()})
        return Holding(lambda m, h: m.parts["relu"](m.parts["a_b"](h)), parts=parts)
    held = nn.ParameterList([nn.Parameter(torch.randn(8) / 3) for _ in range(2)])
    return Holding(lambda m, h: h * m.held[0] + m.held[1], held=held)


@kept(MODULES)
def shared(k: int) -> Part:
    one = linear()
    if k % 2:
        return nn.Sequential(one, nn.Tanh(), one)
    other = linear()
    other.weight = one.weight
    return nn.Sequential(one, nn.Tanh(), other)


@kept(MODULES)
def odd_products(k: int) -> Part:
    return [
        Holding(lambda m, h: m.f(h, h.flip(0)), f=nn.Bilinear(8, 8, 8)),
        Holding(lambda m, h: torch.einsum("bi,ij->bj", h, m.w), w=nn.Parameter(torch.randn(8, 8) / 3)),
        Holding(lambda m, h: h @ m.w.T @ m.w, w=nn.Parameter(torch.randn(8, 8) / 4)),
        Holding(
            lambda m, h: torch.baddbmm(m.b, h[None], m.w[None])[0], w=torch.randn(8, 8) / 3, b=torch.zeros(1, 1, 8)
        ),
    ][k % 4]


# functions


@kept(FUNCTIONS)
def elementwise(k: int) -> Part:
    some: list[Part] = [
        torch.sin,
        lambda h: h * 2 + 1,
        torch.sigmoid,
        lambda h: h.clamp(-1, 1),
        lambda h: h.square() / 3,
    ]
    more: list[Part] = [torch.erf, lambda h: torch.where(h > 0, h, h.exp() - 1), lambda h: h.sign() * h.abs().sqrt()]
    return [*some, *more][k]


@kept(FUNCTIONS)
def reductions(k: int) -> Part:
    return [
        lambda h: h - h.mean(-1, keepdim=True),
        lambda h: h / (h.std(-1, keepdim=True) + 1e-3),
        lambda h: h - torch.logsumexp(h, -1, keepdim=True),
        lambda h: h.cumsum(-1) / 8,
        lambda h: h / h.norm(dim=-1, keepdim=True).clamp_min(1e-6),
        lambda h: h - h.amax(-1, keepdim=True),
        lambda h: h * h.var(unbiased=False),
        lambda h: h - h.median(-1, keepdim=True).values,
    ][k]


@kept(FUNCTIONS)
def moving(k: int) -> Part:
    return [
        lambda h: h.flip(-1),
        lambda h: h.roll(1, 0),
        lambda h: torch.cat([h[:, 4:], h[:, :4]], -1),
        lambda h: torch.stack(h.unbind(-1)[::-1], -1),
        lambda h: h.view(len(h), 2, 4).transpose(1, 2).reshape(len(h), 8),
        lambda h: torch.cat(h.chunk(2, -1)[::-1], 1),
        lambda h: F.pad(h, (1, 1))[:, 1:-1],
        lambda h: h.repeat_interleave(2, 0)[::2],
    ][k]


@kept(FUNCTIONS)
def indexing(k: int) -> Part:
    return [
        lambda h: h.sort(-1).values,
        lambda h: torch.zeros_like(h).scatter(-1, h.topk(4).indices, h.topk(4).values),
        lambda h: h.gather(-1, h.argsort(-1)),
        lambda h: torch.zeros_like(h).index_add(0, torch.arange(len(h)) % 2, h),
        lambda h: h[torch.arange(len(h)) // 2],
        lambda h: h.masked_fill(h < -1, 0.0),
        lambda h: torch.zeros_like(h).scatter_reduce(0, torch.zeros(h.shape, dtype=torch.long), h, "mean"),
        lambda h: h * F.one_hot(h.argmax(-1), 8),
    ][k]


@kept(FUNCTIONS)
def fused(k: int) -> Part:
    def attended(h: Tensor, **options: Any) -> Tensor:
        heads = h.view(1, len(h), 2, 4).transpose(1, 2)
        return F.scaled_dot_product_attention(heads, heads, heads, **options).transpose(1, 2).reshape(len(h), 8)

    return [
        attended,
        lambda h: attended(h, is_causal=True),
        lambda h: attended(h, attn_mask=torch.zeros(len(h), len(h)).fill_(torch.finfo(h.dtype).min).triu(1)),
        lambda h: F.layer_norm(h, (8,)),
        lambda h: F.normalize(h, dim=-1),
        lambda h: F.glu(torch.cat([h, h], -1)),
        lambda h: h * F.cosine_similarity(h[:, None], h[None], dim=-1).mean(-1, keepdim=True),
        lambda h: h + torch.cdist(h, h).mean(-1, keepdim=True),
    ][k]


@kept(FUNCTIONS)
def spectra(k: int) -> Part:
    return [
        lambda h: torch.fft.irfft(torch.fft.rfft(h, dim=-1), n=8, dim=-1),
        lambda h: torch.fft.fft(h, dim=-1).abs() / 3,
        lambda h: torch.view_as_real(torch.view_as_complex(h.reshape(-1, 4, 2).contiguous()) * 1j).reshape(-1, 8),
        lambda h: torch.polar(torch.ones_like(h), h).real,
    ][k % 4]


@kept(FUNCTIONS)
def solved(k: int) -> Part:
    def positive(h: Tensor) -> Tensor:
        return h.T @ h + torch.eye(8)

    return [
        lambda h: h @ torch.linalg.inv(positive(h)),
        lambda h: torch.linalg.solve(positive(h), h.T).T,
        lambda h: h @ torch.linalg.cholesky(positive(h)) / 4,
        lambda h: h @ torch.linalg.qr(positive(h)).Q,
    ][k % 4]


# scales


@kept(SCALES)
def scaled(k: int) -> Part:
    factor = [1e-6, 1e-4, 1e-2, 1e2, 1e4, 1e5, 3e-8, 60000.0][k]
    return lambda h: h * factor


@kept(SCALES)
def there_and_back(k: int) -> Part:
    factor = [1e-6, 1e-4, 1e5, 1e8][k % 4]
    return lambda h: (h * factor) * (1 / factor)


@kept(SCALES)
def loud_weights(k: int) -> Part:
    layer = linear()
    with torch.no_grad():
        layer.weight.mul_([1e4, 1e-5, 300.0, 1e-3][k % 4])
    return nn.Sequential(layer, nn.LayerNorm(8))


@kept(SCALES)
def exploding(k: int) -> Part:
    return [
        lambda h: (h * 3).exp() / (1 + (h * 3).exp()),
        lambda h: h / (h.square().sum(-1, keepdim=True) + 1e-12).sqrt(),
        lambda h: torch.log(h.abs() + 1e-10) / 5,
        lambda h: h.pow(8).clamp(max=1e6).pow(0.125),
        lambda h: 1 / (h.abs() + 1e-4) * 1e-4,
        lambda h: (h + 2048.0) - 2048.0,
        lambda h: torch.nan_to_num(torch.log(h - 1)),
        lambda h: torch.where(h > 0, h.sqrt(), torch.zeros_like(h)),
    ][k]


@kept(SCALES)
def undefined(k: int) -> Part:
    some: list[Part] = [
        lambda h: h.clamp_min(-0.9).log1p().sqrt(),
        lambda h: h / (h - h[:1]),
        lambda h: h.masked_fill(h > 1, -math.inf),
    ]
    part = some[k % 3]
    return part if k == 7 else lambda h: torch.nan_to_num(part(h), posinf=1.0, neginf=-1.0)
