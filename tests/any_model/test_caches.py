"""Models that keep what they made: tables, key-value caches, buffers and parameters of the first forward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import auditor
from tests.any_model.holding import held
from tests.support.subjects import normal, seeded

X = normal(2, 6, 8)


def table(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """A rotary table for six places; the product in it runs low where autocast is on."""
    angles = torch.arange(6.0)[:, None] @ (10000 ** (torch.arange(0, 8, 2) / -8))[None]
    return angles.cos().to(dtype), angles.sin().to(dtype)


class Rotary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def table(self, x: Tensor) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        cos, sin = (part.to(x.dtype) for part in self.table(x))
        even, odd = x[..., 0::2], x[..., 1::2]
        return self.second(torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2))


class InEmptyBuffer(Rotary):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cos", None)
        self.register_buffer("sin", None, persistent=False)

    def table(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if self.cos is None or self.cos.dtype != x.dtype:
            self.cos, self.sin = table(x.dtype)
        return self.cos, self.sin


class ByDtype(Rotary):
    def __init__(self) -> None:
        super().__init__()
        self.tables: dict[torch.dtype, Any] = {}

    def table(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if x.dtype not in self.tables:
            self.tables[x.dtype] = table(x.dtype)
        return self.tables[x.dtype]


class ByDevice(nn.Module):
    """Attention whose biases are looked up once for each device in eval mode: what is kept was computed from a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out, self.biases = nn.Linear(8, 24), nn.Linear(8, 8), nn.Parameter(torch.randn(6))
        self.register_buffer("places", (torch.arange(6)[:, None] - torch.arange(6)).abs(), persistent=False)
        self.kept: dict[str, Tensor] = {}

    def bias(self, device: torch.device) -> Tensor:
        if self.training:
            return self.biases[self.places]
        if str(device) not in self.kept:
            self.kept[str(device)] = self.biases[self.places]
        return self.kept[str(device)]

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.out((q @ k.mT + self.bias(x.device)).softmax(-1) @ v)


def test_biases_kept_for_each_device_follow_the_weights() -> None:
    audit = held(lambda: (seeded(ByDevice).eval(), ((X.clone(),), {})), objective="flops")
    assert all(plan.verified and plan.low_precision_flops == 1 for plan in audit.plans.values())


ROTARY = [
    InEmptyBuffer,
    ByDtype,
]


@pytest.mark.parametrize("kind", ROTARY)
def test_tables_of_the_first_forward(kind: type[nn.Module]) -> None:
    audit = held(lambda: (seeded(kind).eval(), ((X.clone(),), {})), formats=("bf16",))
    assert not any("keeps state" in warning for warning in audit.warnings)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv = nn.Linear(8, 8), nn.Linear(8, 16)

    def attend(self, x: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(self.q(x), k, v)


class Preallocated(Attention):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", torch.zeros(2, 12, 16))
        self.filled = 0

    def forward(self, x: Tensor) -> Tensor:
        self.kept[:, self.filled : self.filled + x.shape[1]] = self.kv(x)
        self.filled += x.shape[1]
        return self.attend(x, *self.kept[:, : self.filled].chunk(2, -1))


class Cache:
    """Keys and values of earlier calls."""

    def __init__(self, *past: Tensor) -> None:
        self.past = list(past)

    def update(self, kv: Tensor) -> tuple[Tensor, ...]:
        self.past.append(kv.to(self.past[0].dtype) if self.past else kv)
        return torch.cat(self.past, 1).chunk(2, -1)


class Held(Attention):
    def __init__(self) -> None:
        super().__init__()
        self.cache = Cache()

    def forward(self, x: Tensor) -> Tensor:
        return self.attend(x, *self.cache.update(self.kv(x)))


@pytest.mark.parametrize("kind", [Preallocated, Held])
def test_key_value_caches_of_the_model(kind: type[nn.Module]) -> None:
    audit = held(lambda: (seeded(kind).eval(), ((X.clone(),), {})), formats=("fp16",))
    assert any("keeps state between calls" in warning for warning in audit.warnings)


class Given(Attention):
    def forward(self, x: Tensor, cache: Any) -> Tensor:
        return self.attend(x, *(part.to(self.q.weight.dtype) for part in cache.update(self.kv(x))))


@pytest.mark.parametrize("past", [(), (normal(2, 3, 16, seed=5),)])
def test_key_value_caches_of_the_caller(past: tuple[Tensor, ...]) -> None:
    cache = Cache(*(x.clone() for x in past))
    model = seeded(Given).eval()
    audit = auditor.audit(model, (X, cache), device="cpu", formats=("fp16",))
    assert [x.shape for x in cache.past] == [x.shape for x in past]
    assert not any("keeps state" in warning for warning in audit.warnings)
    held(lambda: (seeded(Given).eval(), ((X.clone(), Cache(*(x.clone() for x in past))), {})), formats=("fp16",))


class Lazy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.LazyLinear(8), nn.LazyBatchNorm1d(), nn.LazyLinear(4)
        with torch.no_grad():
            self(normal(4, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x)).relu())


class ModuleInForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(8, 8), None

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.head is None:
            self.head = nn.Linear(x.shape[-1], 4).to(x.dtype)
        return self.head(x)


@pytest.mark.parametrize("kind", [Lazy, ModuleInForward])
def test_what_the_first_forward_makes(kind: type[nn.Module]) -> None:
    held(lambda: (seeded(kind).eval(), ((normal(4, 8),), {})), formats=("fp16",))
