"""Positions, angles and grids: formed in the low format, and formed in FP32."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.rules.case import Case, on, raised, ramp

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


class RotaryFromFormula(Rotary):
    """Frequencies are computed in FP32 where they are used."""

    def __init__(self) -> None:
        super().__init__(raised=True, buffer=False)

    def phase(self, x: Tensor, position: Tensor) -> Tensor:
        return position.float()[:, None] * torch.exp(torch.arange(2).float() * -2.3)


class RotaryOfIntegers(Rotary):
    """Arithmetic on integers gives torch's default dtype, in a low model too."""

    def __init__(self) -> None:
        super().__init__(raised=False, buffer=False)

    def phase(self, x: Tensor, position: Tensor) -> Tensor:
        frequencies = 100.0 ** (-torch.arange(0, 4, 2) / 4)
        return torch.arange(1000, 1000 + x.shape[0])[:, None] * frequencies


def step_embedding(t: Tensor, x: Tensor) -> Tensor:
    phase = t.to(x.dtype)[:, None] * x
    return torch.cat([phase.sin(), phase.cos()], -1)


def fourier_features(x: Tensor) -> Tensor:
    phase = x @ torch.ones(2, 3, dtype=x.dtype) + 0.5
    return torch.stack([phase.cos(), phase.sin()])


def fourier_features_shifted(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    phase = x @ w + b
    return torch.stack([phase.cos(), phase.sin()])


def counted(x: Tensor) -> Tensor:
    return x * torch.arange(x.shape[-1], dtype=x.dtype)


def counted_upcast(x: Tensor) -> Tensor:
    return x * torch.arange(x.shape[-1]).float()


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

CASES = (
    # the largest phase is 900 * 1
    Case("rotary", lambda: Rotary(False), (X, FAR), {"POS001": {"mul"}}, ("POS004", "POS007")),
    Case("rotary, joined and scaled", lambda: RotaryJoined(False), (X, FAR), {"POS001": {"mul"}}, ("POS007",)),
    Case("rotary, near", lambda: Rotary(False), (X, POSITIONS), {}, ("POS001", "POS002")),
    Case("rotary, raised", lambda: Rotary(True), (X, FAR), {"POS007": {"to_1"}}, ("POS001", "POS002", "POS003")),
    Case("rotary, raised and joined", lambda: RotaryJoined(True), (X, FAR), {"POS007": {"to_1"}}, ("POS001",)),
    Case("rotary from a formula", RotaryFromFormula, (X, FAR), {}, ("POS001", "POS007")),
    Case("rotary of integers", RotaryOfIntegers, (X, FAR), {}, ("POS001", "POS002", "POS003")),
    Case("step embedding", *on(step_embedding, FAR, X2 * 2), {"POS004": {"mul"}}, ("POS001",)),
    # 60 * (1 + 1) = 120
    Case(
        "fourier features",
        *on(fourier_features_shifted, X2 * 60, torch.ones(2, 3), torch.ones(3)),
        {"POS004": {"matmul"}},
    ),
    Case("fourier features, near", *on(fourier_features, X2), {}, ("POS004",)),
    Case("step embedding, upcast", *on(raised(step_embedding), FAR, X2), {}, ("POS004", "POS002")),
    # 256 is the last whole number before BF16 leaves one out
    Case("counted to 257", *on(counted, ramp(1, 258)), {"POS002": {"arange"}}, ("POS003",)),
    Case("ids to 300", *on(cast_ids, ramp(4), FAR // 3), {"POS002": {"to"}}, ("POS003",)),
    Case("ids to 256", *on(cast_ids, ramp(4), IDS), {}, ("POS002", "POS003")),
    Case("counted in float32", *on(counted_upcast, ramp(1, 3000)), {}, ("POS002", "POS003")),
    Case("counted to 2049", *on(counted, ramp(1, 2050)), {"POS002": {"arange"}, "POS003": {"arange"}}),
    Case("ids to 9000", *on(cast_ids, ramp(4), FAR * 10), {"POS002": {"to"}, "POS003": {"to"}}),
    Case("ids in float32", *on(raised(cast_ids), ramp(4), FAR * 10), {}, ("POS002", "POS003")),
    Case("grid", *on(decoded, ramp(4), IDS), {"POS005": {"add"}}, ("POS006",)),
    Case("grid below", *on(lambda x, cell: x - cell.to(x.dtype), ramp(4), IDS), {"POS005": {"sub"}}),
    Case("small grid", *on(decoded, ramp(4), POSITIONS), {}, ("POS005",)),
    Case("grid, upcast", *on(raised(decoded), ramp(4), IDS), {}, ("POS005",)),
    # 4 * 301 = 1204
    Case("apart by class", *on(apart, X * 300, LABELS), {"POS006": {"add_1"}}),
    Case("apart by subtraction", *on(apart_by_subtraction, X * 300, LABELS), {"POS006": {"sub"}}),
    Case("apart, upcast", *on(raised(apart), X * 300, LABELS), {}, ("POS006",)),
    Case("an additive mask", *on(additive_mask, X, LABELS), {}, ("POS005", "POS006")),
    Case("wave of a model", *on(lambda x: (x * 30).sin().sum(), X), {}, ("POS001", "POS004")),
)
