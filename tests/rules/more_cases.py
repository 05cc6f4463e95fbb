"""More cases of rules: sums, positions, activations, attention, constants, losses, and systems."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.nn.functional as F
from torch import Tensor, nn

from tests.rules.case import Case, on, raised, ramp
from tests.support.capturing import Function


def pooled(x: Tensor) -> Tensor:
    return x.sum(1) / 64.0


def pooled_by_factor(x: Tensor) -> Tensor:
    return x.sum((1, 2), keepdim=True).squeeze() * (1 / 128)


def variance(x: Tensor) -> Tensor:
    mean = x.mean(-1, keepdim=True)
    return (x * x).mean(-1, keepdim=True) - mean * mean


class Stream(nn.Module):
    """A residual stream of `depth` blocks without weights, each of which adds `step` of what tanh gives."""

    def __init__(self, depth: int, step: float = 1e-3) -> None:
        super().__init__()
        self.depth, self.step = depth, step

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.depth):
            x = x + self.step * x.tanh()
        return x.exp()


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


LARGE = torch.full((2, 4), 1000.0)

REDUCTIONS_CASES = (
    Case("pooled by a factor", *on(pooled_by_factor, ramp(2, 16, 8)), {"RED001": {"sum_1"}}),
    Case("pooled few", *on(pooled, ramp(2, 32, 4)), {}, ("RED001",)),
    Case("pooled, upcast", *on(raised(pooled), ramp(2, 64, 4)), {}, ("RED001",)),
    # 64 * 2000 = 128000 > 65504
    Case("pooled, large", *on(pooled, torch.full((1, 64, 2), 2000.0)), {"RED001": {"sum_1"}}, ("RED002",)),
    # 20 ** 4 = 160000
    Case("large product", *on(lambda x: x.prod(-1), torch.full((1, 4), 20.0)), {"RED002": {"prod"}}),
    Case("large total", *on(lambda x: x.cumsum(-1), torch.full((1, 8), 9000.0)), {"RED002": {"cumsum"}}),
    Case("cumsum", *on(lambda x: x.cumsum(-1), ramp(2, 256)), {"RED003": {"cumsum"}}),
    Case("cumprod", *on(lambda x: x.cumprod(0), ramp(300, 2)), {"RED003": {"cumprod"}}),
    Case("short cumsum", *on(lambda x: x.cumsum(-1), ramp(300, 2)), {}, ("RED003",)),
    # the mean square is 10000, the variance 0.3 ** 2: 17 bits cancel
    Case("small variance", *on(variance, 100 + ramp(2, 8, scale=0.3)), {"RED004": {"sub"}}, ("RED009",)),
    Case("variance, upcast", *on(raised(variance), ramp(2, 8)), {}, ("RED004",)),
    Case("long variance", *on(lambda x: x.var(), ramp(2, 2049)), {"RED007": {"var"}}),
    Case("longest short mean", *on(lambda x: x.mean(-1), ramp(2, 4096)), {}, ("RED007",)),
    # at 1 BF16 numbers are 1/128 apart: 12 updates of 0.76e-3 come to 1.2 spacings, each below half of one
    Case("stream of 12", lambda: Stream(12), (ramp(2, 4),), {"RED008": {"add_11"}}),
    Case("stream of 11", lambda: Stream(11), (ramp(2, 4),), {}, ("RED008",)),
    Case("stream of large updates", lambda: Stream(16, 1.0), (ramp(2, 4),), {}, ("RED008",)),
    Case("a clean decoder of eight layers", Decoder, (torch.arange(8)[None],), {}, ("RED008",)),
    Case("opposite numbers", *on(lambda x, y: x + y, LARGE, 2 - LARGE), {"RED009": {"add"}}),
    Case("distant numbers", *on(lambda x, y: x - y, LARGE, LARGE / 2), {}, ("RED009",)),
)


# Positions, angles and grids: formed in the low format, and formed in FP32.


POSITIONS = torch.arange(4)
FREQUENCIES = torch.tensor([1.0, 0.1])


class Rotary(nn.Module):
    def __init__(self, raised: bool, buffer: bool = True) -> None:
        super().__init__()
        self.raised = raised
        if buffer:
            self.register_buffer("frequencies", FREQUENCIES)

    def phase(self, x: Tensor, position: Tensor) -> Tensor:
        if self.raised:
            return position.float()[:, None] * self.frequencies.float()
        return position.to(x.dtype)[:, None] * self.frequencies

    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        phase = self.phase(x, position)
        cos, sin = phase.cos().to(x.dtype), phase.sin().to(x.dtype)
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


class RotaryJoined(Rotary):
    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        phase = self.phase(x, position)
        angle = torch.cat([phase, phase], -1)
        return x * (angle.cos() * 1.5) + x.flip(-1) * (angle.sin() * 1.5)


class RotaryOfIntegers(Rotary):
    """Arithmetic on integers gives torch's default dtype, in a low model too."""

    def __init__(self) -> None:
        super().__init__(raised=False, buffer=False)

    def phase(self, x: Tensor, position: Tensor) -> Tensor:
        frequencies = 100.0 ** (-torch.arange(0, 4, 2) / 4)
        return torch.arange(1000, 1000 + x.shape[0])[:, None] * frequencies


def fourier_features(x: Tensor) -> Tensor:
    phase = x @ torch.ones(2, 3, dtype=x.dtype) + 0.5
    return torch.stack([phase.cos(), phase.sin()])


def fourier_features_shifted(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    phase = x @ w + b
    return torch.stack([phase.cos(), phase.sin()])


def counted(x: Tensor) -> Tensor:
    return x * torch.arange(x.shape[-1], dtype=x.dtype)


def cast_ids(x: Tensor, ids: Tensor) -> Tensor:
    return x * ids.to(x.dtype)


def decoded(offset: Tensor, cell: Tensor) -> Tensor:
    return (offset + cell.to(offset.dtype)) * 8.0


def apart(boxes: Tensor, label: Tensor) -> Tensor:
    return boxes + (label.to(boxes.dtype) * (boxes.max() + 1))[:, None]


def apart_by_subtraction(boxes: Tensor, label: Tensor) -> Tensor:
    return boxes - label.to(boxes.dtype)[:, None] * boxes.amax()


def additive_mask(x: Tensor, keep: Tensor) -> Tensor:
    return x + (1 - keep.to(x.dtype)) * -1e4


FAR = torch.tensor([0, 300, 600, 900])
X = ramp(4, 4)
X2 = ramp(4, 2)
IDS = torch.tensor([0, 100, 200, 256])
LABELS = torch.tensor([1, 2, 3, 4])

POSITIONS_CASES = (
    Case("rotary, joined and scaled", lambda: RotaryJoined(False), (X, FAR), {"POS001": {"mul"}}, ("POS007",)),
    Case("rotary, near", lambda: Rotary(False), (X, POSITIONS), {}, ("POS001", "POS002")),
    Case("rotary of integers", RotaryOfIntegers, (X, FAR), {}, ("POS001", "POS002", "POS003")),
    # 60 * (1 + 1) = 120
    Case(
        "fourier features",
        *on(fourier_features_shifted, X2 * 60, torch.ones(2, 3), torch.ones(3)),
        {"POS004": {"matmul"}},
    ),
    Case("fourier features, near", *on(fourier_features, X2), {}, ("POS004",)),
    # 256 is the last whole number before BF16 leaves one out
    Case("counted to 257", *on(counted, ramp(1, 258)), {"POS002": {"arange"}}, ("POS003",)),
    Case("ids to 256", *on(cast_ids, ramp(4), IDS), {}, ("POS002", "POS003")),
    Case("counted to 2049", *on(counted, ramp(1, 2050)), {"POS002": {"arange"}, "POS003": {"arange"}}),
    Case("ids in float32", *on(raised(cast_ids), ramp(4), FAR * 10), {}, ("POS002", "POS003")),
    Case("grid", *on(decoded, ramp(4), IDS), {"POS005": {"add"}}, ("POS006",)),
    Case("grid below", *on(lambda x, cell: x - cell.to(x.dtype), ramp(4), IDS), {"POS005": {"sub"}}),
    Case("small grid", *on(decoded, ramp(4), POSITIONS), {}, ("POS005",)),
    Case("apart by subtraction", *on(apart_by_subtraction, X * 300, LABELS), {"POS006": {"sub"}}),
    Case("an additive mask", *on(additive_mask, X, LABELS), {}, ("POS005", "POS006")),
)


# Activations: exponentials, gated products, layers near and beyond the end of FP16, divisors that vanish.


def weighted(weight: float) -> nn.Module:
    layer = nn.Linear(4, 4, bias=False)
    nn.init.constant_(layer.weight, weight)
    return layer


def convolved(weight: float) -> nn.Module:
    layer = nn.Conv1d(1, 1, 1, bias=False)
    nn.init.constant_(layer.weight, weight)
    return layer


def gated(x: Tensor, y: Tensor) -> Tensor:
    return F.silu(x) * y


def tanh_gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(0.7978845608 * (x + 0.044715 * x * x * x)))


def density(x: Tensor, y: Tensor) -> Tensor:
    sigma = y.exp()
    return x / (sigma * sigma)


ONES = torch.ones(2, 4)
TINY = torch.full((2, 4), 1e-9)
SMALL = torch.full((2, 4), 2e-7)

ACTIVATIONS_CASES = (
    Case("sinh of 10", *on(torch.sinh, ONES * 10), {"ACT001": {"sinh"}}),
    Case("exponential of 8", *on(torch.exp, ONES * 8), {}, ("ACT001",)),
    Case("exponential, clamped", *on(lambda x: x.clamp(max=9.5).exp(), ONES * 12), {}, ("ACT001",)),
    # a row of four ones times 20000: 80000 > 65504
    Case("large layer", lambda: weighted(20000.0), (ONES,), {"ACT002": {"linear"}}, ("ACT005",)),
    Case("large product", *on(lambda x, y: x * y, ONES * 300, ONES * 301), {"ACT002": {"mul"}}, ("ACT003",)),
    # 300 * 301 = 90300 > 65504, and a gated product by its form
    Case("gate, large", *on(gated, ONES * 300, ONES * 301), {"ACT003": {"mul"}}, ("ACT002",)),
    Case("tanh GELU", *on(tanh_gelu, ramp(2, 4)), {"ACT004": {"mul_3"}}),
    Case("tanh GELU, upcast", *on(raised(tanh_gelu), ramp(2, 4)), {}, ("ACT004",)),
    # 4 * 5000 = 20000 and 30000: 1.7 and 1.1 doublings left
    Case("near layer", lambda: weighted(5000.0), (ONES,), {"ACT005": {"linear"}}, ("ACT002",)),
    Case("near convolution", lambda: convolved(30000.0), (torch.ones(1, 1, 4),), {"ACT005": {"conv1d"}}),
    Case("divided by tiny", *on(lambda x, y: x / y, ONES, TINY), {"ACT006": {"div"}}, ("ACT007",)),
    Case("logarithm of tiny", *on(torch.log, TINY), {"ACT006": {"log"}}),
    # exp(-8) squared is 1.1e-7
    Case("density", *on(density, ONES, ONES * -8), {"ACT007": {"div"}}, ("ACT006",)),
    Case("root of small", *on(torch.rsqrt, SMALL), {"ACT007": {"rsqrt"}}),
)


# Attention, constants and losses.


QUERY = ramp(1, 4, 8)
MASK = torch.tensor([[True, False, False, False]])


def scaled_after(q: Tensor) -> Tensor:
    return torch.softmax(q @ q.transpose(-1, -2) / 8.0, -1) @ q


def others_additive_mask(x: Tensor, m: Tensor) -> Tensor:
    return x + (1.0 - m.to(x.dtype)) * -1e9


def dtype_mask(x: Tensor) -> Tensor:
    return x.masked_fill(MASK, torch.finfo(x.dtype).min)


def dtype_mask_multiplied(x: Tensor, m: Tensor) -> Tensor:
    return x.maximum((1.0 - m.to(x.dtype)) * torch.finfo(x.dtype).min)


def normalised(x: Tensor) -> Tensor:
    return F.normalize(x, dim=-1)  # clamps the norm to 1e-12


def guarded(eps: float) -> Function:
    return Function(lambda x: x / (x.abs() + eps))


def clamped(top: float) -> Function:
    return Function(lambda x: torch.log1p(-x.clamp(max=top)))


def entropy(x: Tensor, y: Tensor) -> Tensor:
    return F.binary_cross_entropy(x.sigmoid(), y)


def entropy_with_logits(x: Tensor, y: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(x, y)


def entropy_protected(x: Tensor, y: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        return F.binary_cross_entropy(x.float().sigmoid(), y.float())


def triplets(x: Tensor, y: Tensor) -> Tensor:
    return F.triplet_margin_loss(x, y, x.flip(0))


TARGET = torch.ones(2, 8)

OTHERS_CASES = (
    # q.q sums eight squares of up to 300: 8 * 90000 > 65504
    Case("scaled after, large", *on(scaled_after, QUERY * 300), {"ATT001": {"matmul"}}, ("ATT002", "ACT002")),
    Case("additive mask", *on(others_additive_mask, ramp(2, 4), MASK), {"CON005": {"mul"}}, ("CON001", "ACT002")),
    # torch takes the literal of a product in FP32: 1e-3 * 1e6 is 1000 in half precision too
    Case(
        "small times a large literal",
        *on(lambda x: x * 1000000.0, ramp(2, 4) * 0.001),
        {},
        ("CON001", "CON005", "ACT002"),
    ),
    Case(
        "a large literal added",
        *on(lambda x: (100000.0 + x).log(), ramp(2, 4)),
        {"CON005": {"add"}},
        ("CON001", "ACT002"),
    ),
    Case("where", *on(lambda x: torch.where(MASK, x, -1000000000.0), ramp(2, 4)), {"CON001": {"where"}}, ("CON005",)),
    Case("mask by dtype, multiplied", *on(dtype_mask_multiplied, ramp(2, 4), MASK), {}, ("ACT002", "CON001", "CON005")),
    Case("mask by dtype", *on(dtype_mask, ramp(2, 4)), {}, ("CON001",)),
    Case("eps of normalize", *on(normalised, ramp(2, 4)), {"CON002": {"clamp_min"}}),
    Case("eps 1e-6", lambda: guarded(1e-06), (ramp(2, 4),), {}, ("CON002",)),
    # FP16 has 1 - 2**-11 = 0.99951 below 1, BF16 1 - 2**-8 = 0.9961
    Case("1 - 1e-6", lambda: clamped(1 - 1e-06), (ramp(2, 4),), {"CON003": {"clamp"}}, ("CON004",)),
    Case("factor 0.9985", *on(lambda x: x * 0.9985, ramp(2, 4)), {"CON004": {"mul"}}, ("CON003",)),
    Case("0.99", lambda: clamped(0.99), (ramp(2, 4),), {}, ("CON003", "CON004")),
    Case("binary cross entropy out of reach of autocast", *on(entropy_protected, ramp(2, 8), TARGET), {}, ("LOS001",)),
    Case("triplets", *on(triplets, ramp(2, 8), TARGET), {"LOS002": {"triplet_margin_loss"}}),
    Case(
        "with logits",
        *on(entropy_with_logits, ramp(2, 8), TARGET),
        {"LOS002": {"binary_cross_entropy_with_logits"}},
        ("LOS001",),
    ),
)


# Collectives, training and hardware.


def scattered(x: Tensor) -> Tensor:
    return functional.reduce_scatter_tensor(x.exp(), "avg", 0, dist.group.WORLD)


def largest_of_ranks(x: Tensor) -> Tensor:
    return functional.all_reduce(x, "max", dist.group.WORLD)


def gathered(x: Tensor) -> Tensor:
    return functional.all_gather_tensor(x.exp(), 0, dist.group.WORLD)


def exchanged(x: Tensor) -> Tensor:
    return functional.all_to_all_single(x, None, None, dist.group.WORLD)


def log_complement(top: float) -> Callable[[Tensor], Tensor]:
    return lambda x: torch.log1p(-x.sigmoid().clamp(max=top))


def root(eps: float) -> Callable[[Tensor], Tensor]:
    return lambda x: (x.pow(2).sum(-1) + eps).sqrt()


def root_per_element(x: Tensor) -> Tensor:
    return torch.sqrt((x * x).clamp_min(1e-12))


class Tied(nn.Module):
    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(8, 8), nn.Linear(8, 8, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embed(tokens).tanh())


def linear(width: int, classes: int) -> Callable[[], nn.Module]:
    return lambda: nn.Linear(width, classes)


def convolution(channels: int, width: int) -> Callable[[], nn.Module]:
    return lambda: nn.Conv2d(channels, width, 3)


SYSTEMS_IDS = torch.tensor([[1, 2, 3, 0]])

SYSTEMS_CASES = (
    Case("reduce scatter", *on(scattered, ramp(2, 4)), {"COL001": {"reduce_scatter_tensor"}}, ("COL002",)),
    Case("all reduce by max", *on(largest_of_ranks, ramp(2, 4)), {}, ("COL001",)),
    Case("all gather", *on(gathered, ramp(2, 4)), {"COL002": {"all_gather_into_tensor"}}, ("COL001",)),
    Case("all to all", *on(exchanged, ramp(2, 4)), {"COL002": {"all_to_all_single"}}, ("COL001",)),
    Case("all gather, upcast", *on(raised(gathered), ramp(2, 4)), {}, ("COL002",)),
    Case("log of complement", *on(log_complement(1 - 1e-06), ramp(2, 4)), {"TRN001": {"clamp"}}),
    Case("log of complement, 1e-3", *on(log_complement(1 - 0.001), ramp(2, 4)), {"TRN004": {"clamp"}}, ("TRN001",)),
    Case("log of complement, wide", *on(log_complement(0.98), ramp(2, 4)), {}, ("TRN001", "TRN004")),
    Case("log of complement, upcast", *on(raised(log_complement(1 - 1e-6)), ramp(2, 4)), {}, ("TRN001", "TRN004")),
    Case("root per element", *on(root_per_element, ramp(2, 4)), {"TRN002": {"clamp_min"}}),
    # FP16 takes 1e-7 for 1.2e-7, and the gradient at zero, 1 / (2 * 3.5e-4), is finite
    Case("root with subnormal eps", *on(root(1e-07), ramp(2, 4)), {}, ("TRN002",)),
    Case("not tied", lambda: Tied(False), (SYSTEMS_IDS,), {}, ("TRN003",)),
    Case("three channels", convolution(3, 16), (ramp(1, 3, 8, 8),), {"HWR001": {"conv2d"}, "HWR002": {"conv2d"}}),
    Case("20 rows", linear(16, 8), (ramp(20, 16),), {"HWR003": {"linear"}}),
    Case("six rows", linear(16, 24), (ramp(6, 16),), {}, ("HWR003",)),
    Case("few numbers", linear(3, 5), (ramp(2, 3),), {}, ("HWR001",)),
)

CASES = (*REDUCTIONS_CASES, *POSITIONS_CASES, *ACTIVATIONS_CASES, *OTHERS_CASES, *SYSTEMS_CASES)
