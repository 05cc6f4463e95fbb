"""Models other than the examples of rules, on which the code of an advice must help too: what surrounds the code differs."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tests.rules.cases import ramp

Operations = Callable[..., Tensor]


@dataclass(frozen=True)
class Elsewhere:
    """A model with the problem of a rule. original: inputs and `until_small` -> result; until_small: what the model does
    with the values in question; names: others that the advice uses."""

    original: Callable[..., Tensor]
    until_small: Operations
    inputs: dict[str, Tensor]
    names: dict[str, Any] = field(default_factory=dict)


class Surrounded(nn.Module):
    """Any computation behind a linear layer, which autocast runs in low precision: each input times 1, without rounding."""

    def __init__(self, compute: Callable[..., Tensor], model: Elsewhere) -> None:
        super().__init__()
        self.compute, self.model = compute, model
        self.one = nn.Parameter(torch.ones(1, 1))

    def forward(self, *inputs: Tensor) -> Tensor:
        through = (x.unsqueeze(-1) @ self.one if x.is_floating_point() else x.unsqueeze(-1) for x in inputs)
        named = dict(zip(self.model.inputs, (x.squeeze(-1) for x in through), strict=True))
        return self.compute(self.model, named)


def as_written(model: Elsewhere, named: dict[str, Tensor]) -> Tensor:
    """The result of the code that a rule reports."""
    return model.original(*named.values(), model.until_small)


def as_advised(code: str) -> Callable[[Elsewhere, dict[str, Tensor]], Tensor]:
    """The result of the code that an advice gives: what it calls y."""

    def run(model: Elsewhere, named: dict[str, Tensor]) -> Tensor:
        space = {"torch": torch, "until_small": model.until_small, **model.names, **named}
        exec(code, space)
        return space["y"]

    return run


def many(
    original: Callable[..., Tensor], *uses: tuple[Operations, dict[str, Tensor]], **names: Any
) -> tuple[Elsewhere, ...]:
    """Models with the same problem, and other operations after it."""
    return tuple(Elsewhere(original, until_small, inputs, names) for until_small, inputs in uses)


def gap(x: Tensor) -> Tensor:
    return x[..., 1:] - x[..., :-1]


def share(x: Tensor) -> Tensor:
    return x / x.sum(-1, keepdim=True)


def hubs(*counts: int) -> Tensor:
    """An index that names entry i so many times."""
    return torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))


def counting(*counts: int) -> tuple[Elsewhere, ...]:
    """Counts by four operations, and what reads them."""
    index, x = hubs(*counts), torch.ones(len(counts))
    size = len(counts)
    given, names = {"x": x, "index": index}, {"size": size}
    return (
        Elsewhere(
            lambda x, index, until: until(x.new_zeros(size).scatter_add(0, index, x.new_ones(len(index)))),
            lambda degree: degree.clamp(min=1).rsqrt(),
            given,
            names,
        ),
        Elsewhere(
            lambda x, index, until: until(
                torch.zeros_like(x).scatter_reduce(0, index, torch.ones_like(index).to(x.dtype), "sum")
            ),
            lambda count: (count / 4096).tanh(),
            given,
            names,
        ),
        Elsewhere(
            lambda x, index, until: until(torch.zeros_like(x).put(index, torch.ones_like(index).to(x.dtype), True)),
            share,
            given,
            names,
        ),
        Elsewhere(
            lambda x, index, until: until(x.new_zeros(size).index_add(0, index, (index >= 0).to(x.dtype))),
            lambda count: count.log1p(),
            given,
            names,
        ),
    )


STEPS = torch.full((2, 3000), 0.25)
SPREAD = torch.arange(64.0).reshape(2, 32) % 5
EVEN = torch.linspace(0, 7, 8).repeat(2, 1)
NEARLY = torch.where(
    torch.arange(5000) < torch.tensor([[1250], [2500], [3750]]), 1000.0, 1004.0
)  # means 1001, 1002, 1003
TINY = torch.full((2, 4), 2.0**-16)
MASKED = torch.tensor([[0.0, 0.0], [1.0, 2.0]])
VECTORS = torch.tensor([[60000.0, 0.0], [0.0, 40000.0]]).to(torch.bfloat16).float()
CELLS = torch.tensor([1024, 1025, 1027, 1030])
OFFSETS = torch.tensor([0.25, 0.5, 0.125, 0.75])
BOXES = torch.tensor([[10.5, 20.5], [11.5, 22.25], [3.0, 4.0]])
CLASSES = torch.tensor([40, 79, 90])


def inverse_of_squares(x: Tensor, until_small: Operations) -> Tensor:
    return until_small(x / (x * x).mean(-1, keepdim=True))


ELSEWHERE = {
    "RED002": many(
        lambda x, until_small: until_small(x.sum(-1)),
        (torch.log1p, {"x": torch.full((2, 300), 512.0)}),
        (torch.sqrt, {"x": torch.full((3, 64), 2048.0)}),
        (lambda total: (total * 1e-5).tanh(), {"x": torch.full((2, 4, 50), 1536.0)}),
    ),
    "RED003": many(
        lambda x, until_small: until_small(x.cumsum(-1)),
        (gap, {"x": STEPS}),
        (lambda total: (0.75 * total).cos(), {"x": torch.ones(1, 5000)}),
        (lambda total: total.remainder(3.0), {"x": torch.full((2, 4000), 0.5)}),
    ),
    "RED004": many(
        lambda x, until_small: until_small((x * x).mean(-1, keepdim=True) - x.mean(-1, keepdim=True) ** 2),
        (lambda variance: torch.rsqrt(variance + 1e-5), {"x": 40 + SPREAD / 4}),
        (torch.sqrt, {"x": 8192 + 512 * SPREAD}),  # variances of 5e5
        (lambda variance: variance.log(), {"x": 1024 + 8 * SPREAD}),
    ),
    "RED006": (
        Elsewhere(
            lambda x, until_small: until_small(torch.sqrt((x * x).sum(-1, keepdim=True))),
            torch.log,
            {"x": torch.full((2, 8), 57344.0)},  # lengths of 162193
        ),
        Elsewhere(
            lambda x, until_small: until_small(torch.sqrt((x * x).sum(-1, keepdim=True))),
            lambda length: (length * 2.0**-12).tanh(),
            {"x": 512 * EVEN},
        ),
        Elsewhere(
            lambda x, until_small: until_small((x * x).sum(-1, keepdim=True).sqrt()),
            lambda length: torch.reciprocal(length * 4096),
            {"x": TINY},
        ),
    ),
    "RED007": many(
        lambda x, until_small: until_small(x.mean(-1)),
        (gap, {"x": NEARLY + torch.tensor([[0.0], [4.0], [0.0]])}),
        (torch.cos, {"x": NEARLY}),
        (lambda mean: (mean - 1000).exp(), {"x": NEARLY.flip(0)}),
    ),
    "RED010": counting(9000, 4500, 20),
    "RED011": counting(1200, 600, 20),
    "NRM003": many(
        lambda x, until_small: until_small(x.pow(2).mean(-1)),
        (lambda energy: 10 * torch.log10(energy), {"x": 512 * EVEN}),
        (torch.sqrt, {"x": 1024 * EVEN}),
        (lambda energy: energy / 1e5, {"x": torch.full((3, 16), 320.0)}),
    ),
    "SFT004": many(
        lambda raw, until_small: until_small(torch.exp(raw)),
        (torch.log1p, {"raw": torch.tensor([8.0, 11.5, 14.0])}),
        (lambda density: density / (1 + density), {"raw": torch.tensor([10.0, 12.0, 12.5])}),
        (lambda density: 1 / (1 + density * 1e-5), {"raw": torch.tensor([[9.0, 13.0], [12.0, 11.5]])}),
    ),
    "ACT001": many(
        lambda raw, until_small: until_small(torch.exp(raw)),
        (lambda density: (density + density.flip(-1)).log(), {"raw": torch.full((2, 8), 10.5)}),
        (lambda density: (density * density).sqrt().sqrt(), {"raw": torch.full((3, 16), 9.5)}),
        (lambda density: 1 - torch.exp(-4 * density * 1e-5), {"raw": torch.tensor([9.75, 10.0, 10.5])}),
    ),
    "ACT008": many(
        lambda x, filters, until_small: until_small(x.pow(2) @ filters),
        (lambda y: 10 * torch.log10(y.clamp(min=1e-5)), {"x": 512 * EVEN, "filters": torch.full((8, 2), 0.5)}),
        (lambda y: (y * 1e-6).sqrt(), {"x": torch.full((3, 16), 384.0), "filters": torch.full((16, 4), 0.0625)}),
        (share, {"x": torch.full((2, 5, 8), 1024.0), "filters": torch.full((8, 3), 0.25)}),
    ),
    "ACT006": many(
        inverse_of_squares,
        (lambda ratio: ratio * 1e-5, {"x": TINY}),
        (torch.log, {"x": TINY * 4}),
        (lambda ratio: ratio * torch.tensor([[1e-4], [0.0]]), {"x": TINY}),
    ),
    "ACT007": many(
        lambda x, until_small: until_small(x / (x * x).mean(-1, keepdim=True)),
        (lambda ratio: ratio * 1e-3, {"x": TINY * 24}),  # squares of 2.25 * 2 ** -24
        (torch.log, {"x": TINY * 24}),
        (lambda ratio: (ratio * 1e-4).tanh(), {"x": torch.cat([TINY * 24, TINY * 40])}),
    ),
    "CON002": (
        *many(
            lambda x, until_small: until_small(torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-8)),
            (lambda inverse: inverse * 1e-3, {"x": torch.zeros(2, 4)}),
            (torch.log, {"x": TINY}),
            eps=1e-8,
        ),
        Elsewhere(
            lambda x, until_small: until_small((x.square().sum(-1, keepdim=True) + 1e-12).rsqrt()),
            lambda inverse: inverse * 2.0**-20,  # inverses of a million
            {"x": torch.zeros(3, 4)},
            {"eps": 1e-12},
        ),
    ),
    "TRN002": many(
        lambda x, until_small: until_small((x.pow(2).sum(-1, keepdim=True) + 1e-10).sqrt()),
        (lambda length: 2e-5 / length, {"x": torch.zeros(2, 4)}),
        (torch.log, {"x": torch.zeros(1, 8)}),
        (lambda length: 9 / length * 1e-4, {"x": torch.zeros(3, 2)}),  # 9 / 1e-5 overflows
        eps=1e-10,
    ),
    "LIN001": many(
        lambda a, until_small: until_small(*torch.linalg.svd(a)),
        (lambda u, s, vh: s.log(), {"a": VECTORS @ torch.ones(2, 2) / 2}),
        (lambda u, s, vh: share(s), {"a": torch.full((4, 4), 32768.0) + torch.diag(torch.full((4,), 16384.0))}),
        (lambda u, s, vh: s.reciprocal() * 2.0**-10, {"a": torch.diag(torch.tensor([512.0, 2.0**-17]))}),
    ),
    "LIN002": many(
        lambda x, until_small: until_small(torch.fft.rfft(x)),
        (lambda spectrum: torch.log1p(spectrum.abs()), {"x": torch.full((1, 4096), 128.0)}),  # 524288
        (lambda spectrum: spectrum.abs() / 2048, {"x": 1024 + ramp(2, 2048).round()}),
        (lambda spectrum: torch.fft.irfft(spectrum)[..., :8], {"x": torch.full((2, 1000), 96.0)}),
    ),
    "LIN003": many(
        lambda a, b, until_small: until_small(torch.cdist(a, b)),
        (torch.log1p, {"a": torch.full((2, 8), 49152.0), "b": torch.full((3, 8), -49152.0)}),  # 278045 apart
        (lambda d: d * 2.0**-16, {"a": torch.full((4, 4), 32768.0), "b": torch.full((4, 4), -32768.0)}),
        (lambda d: torch.exp(-d), {"a": 128 + EVEN, "b": 129 + EVEN}),
    ),
    "LIN004": many(
        lambda a, until_small: until_small(torch.linalg.matrix_exp(a)),
        (share, {"a": torch.diag(torch.tensor([12.0, 13.0]))}),
        (lambda growth: growth.diagonal().log(), {"a": torch.diag(torch.tensor([14.0, 2.0, 1.0]))}),
        (lambda growth: growth @ torch.full((2, 1), 1e-4), {"a": torch.diag(torch.tensor([12.0, 12.5]))}),
    ),
    "POS005": many(
        lambda offset, cell, until_small: until_small(cell.to(offset.dtype) + offset),
        (gap, {"offset": OFFSETS, "cell": CELLS}),
        (torch.frac, {"offset": OFFSETS, "cell": CELLS * 3}),
        (lambda corners: (corners - 1024).sigmoid(), {"offset": OFFSETS, "cell": CELLS}),
    ),
    "POS006": many(
        lambda boxes, label, until_small: until_small(boxes + (label.to(boxes.dtype) * (boxes.max() + 1))[:, None]),
        (gap, {"boxes": BOXES, "label": CLASSES}),
        (lambda apart: torch.exp(gap(apart) / 8), {"boxes": BOXES * 4, "label": CLASSES}),
        (lambda apart: apart.remainder(8.0), {"boxes": BOXES, "label": CLASSES + 1}),
    ),
    "RTE003": many(
        lambda x, codes, until_small: until_small(
            x.pow(2).sum(1, keepdim=True) + codes.pow(2).sum(1) - 2 * x @ codes.t()
        ),
        (torch.log1p, {"x": 1024 * EVEN, "codes": torch.zeros(3, 8)}),
        (lambda d: torch.softmax(-d, -1), {"x": 64 + EVEN, "codes": 63 + EVEN[:1] + torch.tensor([[0.0], [1.0]])}),
        (torch.sqrt, {"x": torch.full((2, 4), 512.0), "codes": -torch.full((2, 4), 512.0)}),
    ),
}  # fmt: skip
"""{rule: three models or more with its problem, none of which is the rule's example}. All inputs have few digits, so that a
cast of the whole model rounds none of them."""
