"""Activations: exponentials, gated products, layers near and beyond the end of FP16, divisors that vanish."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.rules.case import Case, on, raised, ramp


def weighted(weight: float) -> nn.Module:
    layer = nn.Linear(4, 4, bias=False)
    nn.init.constant_(layer.weight, weight)
    return layer


def convolved(weight: float) -> nn.Module:
    layer = nn.Conv1d(1, 1, 1, bias=False)
    nn.init.constant_(layer.weight, weight)
    return layer


class Upcast(nn.Module):
    """A layer out of reach of autocast, its input raised."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return self.layer(x.float())


def gated(x: Tensor, y: Tensor) -> Tensor:
    return F.silu(x) * y


def gated_by_sigmoid(x: Tensor, y: Tensor) -> Tensor:
    return y * torch.sigmoid(x)


def tanh_gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(0.7978845608 * (x + 0.044715 * x * x * x)))


def tanh_gelu_with_pow(x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + torch.tanh((x + 0.044715 * torch.pow(x, 3.0)) * 0.7978845608))


def density(x: Tensor, y: Tensor) -> Tensor:
    sigma = y.exp()
    return x / (sigma * sigma)


ONES = torch.ones(2, 4)
TINY = torch.full((2, 4), 1e-9)
SMALL = torch.full((2, 4), 2e-7)

CASES = (
    # exp(9.5) = 13360 is within a factor of 8 of 65504; exp(8) = 2981 is not, exp(12) is beyond
    Case("exponential of 9.5", *on(torch.exp, ONES * 9.5), {"ACT001": {"exp"}}),
    Case("sinh of 10", *on(torch.sinh, ONES * 10), {"ACT001": {"sinh"}}),
    Case("exponential of 8", *on(torch.exp, ONES * 8), {}, ("ACT001",)),
    Case("exponential of 12", *on(torch.exp, ONES * 12), {"SFT004": {"exp"}}, ("ACT001",)),
    Case("exponential, clamped", *on(lambda x: x.clamp(max=9.5).exp(), ONES * 12), {}, ("ACT001",)),
    # a row of four ones times 20000: 80000 > 65504
    Case("large layer", lambda: weighted(20000.0), (ONES,), {"ACT002": {"linear"}}, ("ACT005",)),
    Case("large product", *on(lambda x, y: x * y, ONES * 300, ONES * 301), {"ACT002": {"mul"}}, ("ACT003",)),
    Case("large layer, upcast", lambda: Upcast(weighted(20000.0)), (ONES,), {}, ("ACT002", "ACT005")),
    Case("what overflowed before", *on(lambda x: x - 1, ONES * 1000000.0), {}, ("ACT002",)),
    Case("a literal beyond FP16", *on(lambda x: x * 1000000.0, ONES), {}, ("ACT002",)),
    # 300 * 301 = 90300 > 65504, and a gated product by its form
    Case("gate, large", *on(gated, ONES * 300, ONES * 301), {"ACT003": {"mul"}}, ("ACT002",)),
    # 300 * 100 = 30000: 1.1 doublings left
    Case("gate", *on(gated, ONES * 300, ONES * 100), {"ACT003": {"mul"}}, ("ACT002",)),
    Case("gate by sigmoid", *on(gated_by_sigmoid, ONES, ONES * 9000), {"ACT003": {"mul"}}),
    Case("small gate", *on(gated, ONES, ONES), {}, ("ACT003",)),
    Case("gate, upcast", *on(raised(gated), ONES * 300, ONES * 100), {}, ("ACT003",)),
    Case("tanh GELU", *on(tanh_gelu, ramp(2, 4)), {"ACT004": {"mul_3"}}),
    Case("tanh GELU with pow", *on(tanh_gelu_with_pow, ramp(2, 4)), {"ACT004": {"pow_1"}}),
    Case("tanh GELU, upcast", *on(raised(tanh_gelu), ramp(2, 4)), {}, ("ACT004",)),
    Case("native tanh GELU", *on(lambda x: F.gelu(x, approximate="tanh"), ramp(2, 4)), {}, ("ACT004",)),
    # 4 * 5000 = 20000 and 30000: 1.7 and 1.1 doublings left
    Case("near layer", lambda: weighted(5000.0), (ONES,), {"ACT005": {"linear"}}, ("ACT002",)),
    Case("near convolution", lambda: convolved(30000.0), (torch.ones(1, 1, 4),), {"ACT005": {"conv1d"}}),
    Case("far layer", lambda: weighted(1.0), (ONES,), {}, ("ACT002", "ACT005")),
    Case("divided by tiny", *on(lambda x, y: x / y, ONES, TINY), {"ACT006": {"div"}}, ("ACT007",)),
    Case("logarithm of tiny", *on(torch.log, TINY), {"ACT006": {"log"}}),
    Case("divided by tiny, upcast", *on(lambda x, y: x / y.float(), ONES, TINY), {}, ("ACT006",)),
    Case("divided by one", *on(lambda x, y: x / y, ONES, ONES), {}, ("ACT006", "ACT007")),
    Case("tiny divided", *on(lambda x, y: y / x, ONES, TINY), {}, ("ACT006", "ACT007")),
    # exp(-8) squared is 1.1e-7
    Case("density", *on(density, ONES, ONES * -8), {"ACT007": {"div"}}, ("ACT006",)),
    Case("root of small", *on(torch.rsqrt, SMALL), {"ACT007": {"rsqrt"}}),
)
