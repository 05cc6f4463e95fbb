"""Collectives, training and hardware."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn

from tests.rules.case import Case, on, raised, ramp


def reduced(x: Tensor) -> Tensor:
    return functional.all_reduce(x.exp(), "sum", dist.group.WORLD)


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


def focal(x: Tensor) -> Tensor:
    p = x.sigmoid().clamp(1e-4, 1 - 1e-4)
    return torch.log(1 - p) * p


def focal_wide(x: Tensor) -> Tensor:
    p = x.sigmoid().clamp(1e-3, 1 - 1e-3)
    return torch.log(1 - p) * p


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


class Shared(Tied):
    """One table looked up twice: by source and by target."""

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embed(tokens) * self.embed(tokens.flip(-1)))


def linear(width: int, classes: int) -> Callable[[], nn.Module]:
    return lambda: nn.Linear(width, classes)


def convolution(channels: int, width: int) -> Callable[[], nn.Module]:
    return lambda: nn.Conv2d(channels, width, 3)


IDS = torch.tensor([[1, 2, 3, 0]])

CASES = (
    Case("all reduce", *on(reduced, ramp(2, 4)), {"COL001": {"all_reduce"}}, ("COL002",)),
    Case("reduce scatter", *on(scattered, ramp(2, 4)), {"COL001": {"reduce_scatter_tensor"}}, ("COL002",)),
    Case("all reduce, upcast", *on(raised(reduced), ramp(2, 4)), {}, ("COL001",)),
    Case("all reduce by max", *on(largest_of_ranks, ramp(2, 4)), {}, ("COL001",)),
    Case("all gather", *on(gathered, ramp(2, 4)), {"COL002": {"all_gather_into_tensor"}}, ("COL001",)),
    Case("all to all", *on(exchanged, ramp(2, 4)), {"COL002": {"all_to_all_single"}}, ("COL001",)),
    Case("all gather, upcast", *on(raised(gathered), ramp(2, 4)), {}, ("COL002",)),
    Case("log of complement", *on(log_complement(1 - 1e-06), ramp(2, 4)), {"TRN001": {"clamp"}}),
    Case("focal", *on(focal, ramp(2, 4)), {"TRN001": {"clamp"}}),
    Case("log of complement, 1e-3", *on(log_complement(1 - 0.001), ramp(2, 4)), {"TRN004": {"clamp"}}, ("TRN001",)),
    Case("focal, 1e-3", *on(focal_wide, ramp(2, 4)), {"TRN004": {"clamp"}}, ("TRN001",)),
    Case("log of complement, wide", *on(log_complement(0.98), ramp(2, 4)), {}, ("TRN001", "TRN004")),
    Case("log of complement, upcast", *on(raised(log_complement(1 - 1e-6)), ramp(2, 4)), {}, ("TRN001", "TRN004")),
    Case("root with tiny eps", *on(root(1e-12), ramp(2, 4)), {"TRN002": {"add"}}),
    Case("root per element", *on(root_per_element, ramp(2, 4)), {"TRN002": {"clamp_min"}}),
    Case("root with eps", *on(root(0.0001), ramp(2, 4)), {}, ("TRN002",)),
    # FP16 takes 1e-7 for 1.2e-7, and the gradient at zero, 1 / (2 * 3.5e-4), is finite
    Case("root with subnormal eps", *on(root(1e-07), ramp(2, 4)), {}, ("TRN002",)),
    Case("root with tiny eps, upcast", *on(raised(root(1e-12)), ramp(2, 4)), {}, ("TRN002",)),
    Case("tied", lambda: Tied(True), (IDS,), {"TRN003": {"embedding"}}),
    Case("shared", lambda: Shared(False), (IDS,), {"TRN003": {"embedding", "embedding_1"}}),
    Case("not tied", lambda: Tied(False), (IDS,), {}, ("TRN003",)),
    Case("no table", linear(8, 8), (ramp(8, 8),), {}, ("TRN003",)),
    Case("ten classes", linear(16, 10), (ramp(8, 16),), {"HWR001": {"linear"}}, ("HWR002",)),
    Case("three channels", convolution(3, 16), (ramp(1, 3, 8, 8),), {"HWR001": {"conv2d"}, "HWR002": {"conv2d"}}),
    Case("sixteen channels", convolution(16, 8), (ramp(1, 16, 8, 8),), {"HWR002": {"conv2d"}}, ("HWR001",)),
    Case("multiples of eight", linear(16, 24), (ramp(8, 16),), {}, ("HWR001", "HWR002")),
    Case("26 rows", linear(16, 24), (ramp(2, 13, 16),), {"HWR003": {"linear"}}, ("HWR001",)),
    Case("20 rows", linear(16, 8), (ramp(20, 16),), {"HWR003": {"linear"}}),
    Case("32 rows", linear(16, 24), (ramp(2, 16, 16),), {}, ("HWR003",)),
    Case("six rows", linear(16, 24), (ramp(6, 16),), {}, ("HWR003",)),
    Case("few numbers", linear(3, 5), (ramp(2, 3),), {}, ("HWR001",)),
    Case("no layer", *on(torch.exp, ramp(2, 4)), {}, ("HWR001", "HWR002")),
)
