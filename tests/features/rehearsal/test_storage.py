"""Frozen weights in FP16, in BF16 or quantized beside trained FP32 parameters, and several optimizers: every rehearsal
agrees with a loop by hand."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import auditor
from auditor.emulation.emulate import emulate
from tests.features.rehearsal.cases import classes
from tests.support.thinned import thinned

Step = Callable[[Any, Any], Any]
HALF, BF16 = torch.float16, torch.bfloat16


class Adapted(nn.Module):
    """A frozen linear layer with a low-rank adapter in FP32. cast: the dtype to which its forward casts explicitly."""

    def __init__(self, base: nn.Module, inputs: int, outputs: int, cast: torch.dtype | None = None) -> None:
        super().__init__()
        self.base, self.cast = base.requires_grad_(False), cast
        self.down, self.up = nn.Linear(inputs, 4, bias=False), nn.Linear(4, outputs, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.cast is None:
            return self.base(x) + self.up(self.down(x))
        return self.base(x.to(self.cast)).float() + self.up(self.down(x.float()))


class Quantized(nn.Module):
    """A linear layer of INT8 weights with a scale per row."""

    q: torch.Tensor
    scale: torch.Tensor

    def __init__(self, layer: nn.Linear, dtype: torch.dtype) -> None:
        super().__init__()
        scale = layer.weight.detach().abs().amax(1, keepdim=True) / 127
        self.register_buffer("q", (layer.weight.detach() / scale).round().to(torch.int8))
        self.register_buffer("scale", scale.to(dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.q.to(self.scale.dtype) * self.scale)


def _adapters(dtype: torch.dtype, cast: torch.dtype | None = None) -> nn.Module:
    layers = [
        Adapted(nn.Linear(16, 32).to(dtype), 16, 32, cast),
        nn.GELU(),
        Adapted(nn.Linear(32, 4).to(dtype), 32, 4, cast),
    ]
    return nn.Sequential(*layers)


def _one_module(dtype: torch.dtype) -> nn.Module:
    """The frozen weight and the adapters are parameters of the same module."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 16).to(dtype) / 4, requires_grad=False)
            self.down, self.up = nn.Parameter(torch.randn(4, 16) / 4), nn.Parameter(torch.zeros(4, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.linear(x, self.weight) + F.linear(F.linear(x, self.down), self.up)

    return Layer()


def _quantized(dtype: torch.dtype) -> nn.Module:
    return nn.Sequential(Adapted(Quantized(nn.Linear(16, 32), dtype), 16, 32), nn.GELU(), nn.Linear(32, 4))


def _norm_and_embedding(dtype: torch.dtype) -> nn.Module:
    """A frozen base whose residual stream is in its dtype, since the embedding of the inputs is."""

    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.position = nn.Parameter(torch.randn(16).to(dtype), requires_grad=False)
            self.norm = nn.LayerNorm(16).to(dtype).requires_grad_(False)
            self.layer, self.head = Adapted(nn.Linear(16, 16).to(dtype), 16, 16), nn.Linear(16, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x + self.position
            return self.head(x + self.layer(self.norm(x)))

    return Residual()


def _trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def _step(model: nn.Module, *optimizers: torch.optim.Optimizer, dtype: torch.dtype, inputs: torch.dtype | None) -> Step:
    scaler = torch.amp.GradScaler("cpu", init_scale=65536.0, enabled=dtype is HALF)

    def step(x: torch.Tensor, y: torch.Tensor) -> float:
        for optimizer in optimizers:
            optimizer.zero_grad()
        with torch.autocast("cuda", dtype=dtype):
            loss = F.cross_entropy(model(x if inputs is None else x.to(inputs)), y)
        scaler.scale(loss).backward()
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        return float(loss.detach())

    return step


def _plain(make: Callable[[torch.dtype], nn.Module], dtype: torch.dtype, inputs: torch.dtype | None = None) -> Step:
    model = make(dtype)
    return _step(model, torch.optim.AdamW(_trained(model), lr=1e-2), dtype=dtype, inputs=inputs)


def _mixed_optimizers(dtype: torch.dtype) -> Step:
    model = _adapters(dtype)
    matrices, rest = _trained(model)[:2], _trained(model)[2:]
    optimizers = torch.optim.SGD(matrices, lr=0.1, momentum=0.9), torch.optim.AdamW(rest, lr=1e-2)
    return _step(model, *optimizers, dtype=dtype, inputs=None)


def _encoder(dtype: torch.dtype) -> Step:
    """A frozen encoder, called outside autocast in its own dtype."""
    encoder = nn.Sequential(nn.Linear(16, 32), nn.GELU()).to(dtype).requires_grad_(False)
    head = nn.Linear(32, 4)
    inner = _step(head, torch.optim.AdamW(head.parameters(), lr=1e-2), dtype=dtype, inputs=None)

    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        with torch.no_grad():
            encoded = encoder(x.to(dtype))
        return inner(encoded, y)

    return step


def _regression(dtype: torch.dtype) -> Step:
    """The loss compares the outputs with targets in the dtype of the frozen base."""
    model = _adapters(dtype)
    optimizer = torch.optim.AdamW(_trained(model), lr=1e-2)

    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=dtype):
            out = model(x)
        loss = F.mse_loss(out, F.one_hot(y, 4).to(out.dtype))
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    return step


CASES: dict[str, Callable[[], tuple[str, Step]]] = {
    "FP16 base": lambda: ("fp16_autocast", _plain(_adapters, HALF)),
    "FP16 base, FP16 inputs": lambda: ("fp16_autocast", _plain(_adapters, HALF, HALF)),
    "BF16 base": lambda: ("bf16_autocast", _plain(_adapters, BF16)),
    "quantized base, FP16 scales": lambda: ("fp16_autocast", _plain(_quantized, HALF)),
    "quantized base, BF16 scales": lambda: ("bf16_autocast", _plain(_quantized, BF16)),
    "one module": lambda: ("fp16_autocast", _plain(_one_module, HALF)),
    "residual stream": lambda: ("bf16_autocast", _plain(_norm_and_embedding, BF16)),
    "residual stream, low inputs": lambda: ("fp16_autocast", _plain(_norm_and_embedding, HALF, HALF)),
    "explicit casts": lambda: ("fp16_autocast", _plain(lambda dtype: _adapters(dtype, dtype), HALF)),
    "two optimizers": lambda: ("fp16_autocast", _mixed_optimizers(HALF)),
    "FP16 encoder": lambda: ("fp16_autocast", _encoder(HALF)),
    "BF16 encoder": lambda: ("bf16_autocast", _encoder(BF16)),
    "regression": lambda: ("bf16_autocast", _regression(BF16)),
}


@pytest.mark.parametrize("name", thinned(CASES))
def test_a_frozen_part_in_low_precision_is_rehearsed_as_by_hand(name: str) -> None:
    torch.manual_seed(0)
    recipe, step = CASES[name]()
    batches = classes(4)
    runs = auditor.rehearse(step, batches, 3, remedies=False).runs
    torch.manual_seed(0)
    with emulate("cuda"):
        by_hand = [step(*batches[number]) for number in range(3)]
    assert all(run.failure is None for key, run in runs.items() if key != "bf16"), runs
    assert runs[recipe].losses == pytest.approx(by_hand, rel=1e-6)
    assert runs[recipe].losses != runs["fp32"].losses
    assert runs["fp32"].losses == pytest.approx(by_hand, rel=3e-2)
    assert all(error is not None and 0 < error < 0.1 for error in runs[recipe].errors)
