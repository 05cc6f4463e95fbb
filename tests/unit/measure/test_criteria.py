"""What operations take of criteria, against brute force: one of them low at a time, held to definitions written out here."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from auditor.criteria import criteria_of
from auditor.criteria.measure import criteria_for
from auditor.isolation.answer import answer
from auditor.isolation.outputs import tensor_outputs
from auditor.measure.attribute import first_order
from auditor.measure.measure import Measurement
from auditor.measure.rerun import Yardstick
from auditor.measure.settle import settle
from auditor.records import Contribution
from tests.support.brute_force import OneLow, spearman
from tests.support.subjects import measurement_of

Share = Callable[[Tensor, Tensor], float]


class Tokens(nn.Module):
    """Two blocks of attention and a perceptron."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(60, 32), head
        self.qkv = nn.ModuleList([nn.Linear(32, 96) for _ in range(2)])
        self.up = nn.ModuleList([nn.Linear(32, 64) for _ in range(2)])
        self.down = nn.ModuleList([nn.Linear(64, 32) for _ in range(2)])
        self.norms = nn.ModuleList([nn.LayerNorm(32) for _ in range(5)])

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for i in range(2):
            q, k, v = self.qkv[i](self.norms[2 * i](x)).chunk(3, -1)
            x = x + (q @ k.transpose(-1, -2) / 32**0.5).softmax(-1) @ v
            x = x + self.down[i](F.gelu(self.up[i](self.norms[2 * i + 1](x))))
        return self.head(self.norms[4](x))


class Pixels(nn.Module):
    """Convolutions and norms over an image, and a row for every place in it."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 32, 3, 2, 1)
        self.third, self.fourth = nn.Conv2d(32, 32, 3, padding=1), nn.Conv2d(32, 32, 1)
        self.group, self.batch, self.head = nn.GroupNorm(4, 32), nn.BatchNorm2d(32), head

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.group(self.second(F.relu(self.first(x)))))
        x = x + F.silu(self.batch(self.third(x)))
        return self.head((2 * torch.tanh(self.fourth(x))).flatten(2).transpose(1, 2))


class Gates(nn.Module):
    """Four gated layers beside a residual."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(12, 32), head
        self.layers = nn.ModuleList([nn.Linear(32, 64) for _ in range(4)])
        self.norms = nn.ModuleList([nn.LayerNorm(32) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer, norm in zip(self.layers, self.norms, strict=True):
            value, gate = layer(norm(x)).chunk(2, -1)
            x = x + value * torch.sigmoid(gate)
        return self.head(x)


class Boxes(nn.Module):
    """Corners of boxes in pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        middle, size = self.layer(x).split(2, -1)
        middle, half = 300 + 100 * middle, 30 * (size / 2).exp()
        return torch.cat([middle - half, middle + half], -1)


class Mask(nn.Module):
    """True and false, and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) > 0.1


class LogShares(nn.Module):
    """Log-probabilities."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 40)

    def forward(self, x: Tensor) -> Tensor:
        return torch.log_softmax(3 * self.layer(x), -1)


BODIES: dict[str, tuple[Callable[[nn.Module], nn.Module], Callable[[torch.Generator], Tensor]]] = {
    "tokens": (Tokens, lambda g: torch.randint(0, 60, (8, 16), generator=g)),
    "pixels": (Pixels, lambda g: torch.randn(2, 3, 16, 16, generator=g)),
    "gates": (Gates, lambda g: torch.randn(8, 24, 12, generator=g)),
}


def kl(r: Tensor, c: Tensor) -> float:
    p, q = r.softmax(-1), c.softmax(-1)
    return math.sqrt(max(float((p * (p.log() - q.log())).sum(-1).mean()), 0.0) / 0.001)


def taken(r: Tensor, c: Tensor) -> float:
    ours, theirs = (x.reshape(-1, x.shape[-1]).topk(5).indices.tolist() for x in (r, c))
    kept = sum(len(set(a) & set(b)) for a, b in zip(ours, theirs, strict=True))
    return (1 - kept / (5 * len(ours))) / 0.1


def cosine(r: Tensor, c: Tensor) -> float:
    return math.sqrt(max(float((1 - F.cosine_similarity(r, c, dim=-1)).mean()), 0.0) / 0.001)


def iou(r: Tensor, c: Tensor) -> float:
    shared = (torch.minimum(r[..., 2:], c[..., 2:]) - torch.maximum(r[..., :2], c[..., :2])).clamp(min=0).prod(-1)
    union = (r[..., 2:] - r[..., :2]).prod(-1) + (c[..., 2:] - c[..., :2]).prod(-1) - shared
    return float((1 - shared / union).max()) / 0.05


def cubes(r: Tensor, c: Tensor) -> float:
    return float((c - r).abs().pow(3).mean()) ** (1 / 3)


KINDS: dict[str, tuple[Callable[[], nn.Module], Share]] = {
    "rel_l2 <= 0.01": (lambda: nn.Linear(32, 32), lambda r, c: float((c - r).norm() / r.norm()) / 0.01),
    "max_abs <= 0.02": (lambda: nn.Linear(32, 32), lambda r, c: float((c - r).abs().max()) / 0.02),
    "mean_abs <= 0.01": (lambda: nn.Linear(32, 32), lambda r, c: float((c - r).abs().mean()) / 0.01),
    "rel_max <= 0.01": (lambda: nn.Linear(32, 32), lambda r, c: float((c - r).abs().max() / r.abs().max()) / 0.01),
    "kl <= 0.001": (lambda: nn.Linear(32, 40), kl),
    "nats <= 0.1": (LogShares, lambda r, c: float((c.log_softmax(-1) - r.log_softmax(-1)).abs().max()) / 0.1),
    "top1 >= 0.9": (
        lambda: nn.Linear(32, 40),
        lambda r, c: float((c.argmax(-1) != r.argmax(-1)).double().mean()) / 0.1,
    ),
    "topk(5) >= 0.9": (lambda: nn.Linear(32, 40), taken),
    "flips <= 0.1": (lambda: nn.Linear(32, 32), lambda r, c: float(((c > 0) != (r > 0)).double().mean()) / 0.1),
    "flips <= 0.01": (Mask, lambda r, c: float((c != r).double().mean()) / 0.01),
    "cosine >= 0.999": (lambda: nn.Linear(32, 32), cosine),
    "psnr >= 40": (
        lambda: nn.Sequential(nn.Linear(32, 16), nn.Sigmoid()),
        lambda r, c: 100 * float((c - r).square().mean().sqrt() / (r.max() - r.min())),
    ),
    "iou >= 0.95": (Boxes, iou),
    "cubes <= 0.1": (lambda: nn.Linear(32, 32), lambda r, c: cubes(r, c) / 0.1),
}
"""{criterion: what it is asked of, and the share of it that two outputs take, by definition}."""

COUNTS = ("top1", "topk", "flips")


class Case:
    """A model under one criterion: what was found of its operations, and what is true."""

    def __init__(self, text: str, body: str) -> None:
        head, self.share = KINDS[text]
        self.counts = text.startswith(COUNTS)
        torch.manual_seed(1)
        make, inputs = BODIES[body]
        model, x = make(head()).eval(), inputs(torch.Generator().manual_seed(3))
        asked: Any = {"output": (cubes, 0.1)} if text.startswith("cubes") else f"output: {text}"
        held = criteria_for(criteria_of(asked), 0.01, answer(model, ((x,), {})))
        self.measured: Measurement = measurement_of(model, x)
        first = first_order(self.measured, 0, Yardstick(1.0, held))
        self.found, _ = settle(self.measured, first, Yardstick(1.0, held))
        self.answers, self.predicted = first.answers, first.contributions

    def compared(self, fmt: str) -> list[tuple[Contribution, Contribution, float]]:
        """Of every operation that moves the output what was found, and predicted, and how much it takes."""
        reference = self.measured.outputs[0].detach().double()
        flat = [x.detach() if isinstance(x, Tensor) else x for x in self.measured.flat_inputs]
        found = []
        for name, node in self.measured.capture.nodes.items():
            with torch.no_grad():
                low = tensor_outputs(OneLow(self.measured.capture.graph_module, name, fmt).run(*flat))[0].double()
            if node.floating and (self.counts or float((low - reference).norm() / reference.norm()) > 1e-7):
                found.append((self.found[name][fmt], self.predicted[name][fmt], self.share(reference, low)))
        return found


def fits(pairs: list[tuple[float, float]]) -> None:
    ratios = [found / true for found, true in pairs]
    assert len(pairs) >= 9
    assert spearman(*map(list, zip(*pairs, strict=True))) >= 0.95
    assert 0.9 <= statistics.median(ratios) <= 1.1


def check(text: str, body: str, *formats: str) -> None:
    """What is predicted fits brute force, what was run alone is equal to it, and what is safe with others is safe alone."""
    case = Case(text, body)
    for compared in map(case.compared, formats):
        alone = [(found.isolated, true) for found, _, true in compared if found.decided_by == "re-run"]
        assert all(true / 1.6 <= found <= 1.6 * true for found, true in alone)  # the largest error is one rounding
        assert sum(found == pytest.approx(true, rel=1e-3) for found, true in alone) >= 0.8 * len(alone)
        grouped = [(found.isolated, true) for found, _, true in compared if found.decided_by == "group"]
        assert all(true <= 1.05 * max(found, 0.25) for found, true in grouped)
        if case.answers:
            fits([(predicted.isolated, true) for _, predicted, true in compared])
        assert not any(found.decided_by == "not-run" for found, _, _ in compared)


@pytest.mark.parametrize(
    ("text", "body"),
    [("kl <= 0.001", "gates"), ("max_abs <= 0.02", "pixels"), ("top1 >= 0.9", "gates"), ("psnr >= 40", "tokens")],
)
def test_against_brute_force(text: str, body: str) -> None:
    check(text, body, "bf16")


@pytest.mark.slow
@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("text", KINDS)
def test_every_kind_against_brute_force_on_three_models(text: str, body: str) -> None:
    check(text, body, "fp16", "bf16")


class Pair(nn.Module):
    """Two outputs of which errors on the way to one do not reach the other."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.one, self.other = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        seen = torch.tanh(self.shared(x))
        return self.one(seen).exp(), torch.sigmoid(self.other(seen))


def test_of_several_criteria_that_one_counts_of_which_most_is_taken() -> None:
    torch.manual_seed(0)
    model, x = Pair().eval(), torch.randn(16, 8)
    measured = measurement_of(model, x)
    reference = answer(model, ((x,), {}))

    def under(*asked: str) -> dict[str, Contribution]:
        held = criteria_for(criteria_of(asked), 1e6, reference)
        return {
            name: found["bf16"]
            for name, found in first_order(measurement_of(model, x), 0, Yardstick(1.0, held)).contributions.items()
        }

    first, second = "0: rel_l2 <= 0.02", "1: psnr >= 45"
    alone, other, both = under(first), under(second), under(first, second)
    told = set()
    for name in measured.capture.nodes:
        larger = alone[name] if alone[name].isolated > other[name].isolated else other[name]
        assert both[name].isolated == pytest.approx(larger.isolated)
        assert both[name].own == pytest.approx(max(alone[name].own, other[name].own))
        assert both[name].criterion == (first if larger is alone[name] else second)
        told.add(both[name].criterion)
    assert told == {first, second}
