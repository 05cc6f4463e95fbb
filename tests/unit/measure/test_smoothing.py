"""Smoothing of inputs with outlier channels: its effect against a model into whose modules the factors are folded."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from auditor import audit
from auditor.features.quantization.report import quantization_lines
from auditor.measure.smoothing import ALPHAS
from auditor.records.audit import Audit
from auditor.records.quantization import QuantizedLayer
from tests.support.quantizing import by_hand, change
from tests.support.replaying import Model
from tests.support.subjects import normal, seeded

WIDTH = 64


class Root(nn.Module):
    """A norm by hand: the weight multiplies a normalized value."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5))


def behind(norm: nn.Module) -> nn.Module:
    """Two layers that read a norm, one channel of which is large."""

    def forward(m: Any, x: Tensor) -> Tensor:
        x = m.norm(x)
        return m.out(torch.tanh(m.left(x)) + m.right(x))

    parts = {name: nn.Linear(WIDTH, WIDTH) for name in ("left", "right", "out")}
    model = Model(forward, norm=norm, **parts)
    with torch.no_grad():
        model.norm.weight[7] *= 200
        for reader in (model.left, model.right):
            reader.weight[:, 7] /= 200
    return model


def gated() -> nn.Module:
    parts = {"gate": nn.Linear(WIDTH, 128), "up": nn.Linear(WIDTH, 128), "down": nn.Linear(128, WIDTH)}
    model = Model(lambda m, x: m.down(F.silu(m.gate(x)) * m.up(x)), **parts)
    with torch.no_grad():
        model.up.weight[7] *= 200
        model.up.bias[7] *= 200
        model.down.weight[:, 7] /= 200
    return model


def audited(model: nn.Module, x: Tensor, scheme: str = "int8") -> Audit:
    return audit(model, x, formats=scheme, max_error=0.02, strategies="cast", quick=True)


def layer(found: Audit, owner: str) -> QuantizedLayer:
    return next(one for one in found.quantization if one.owner == owner)


def folded(model: nn.Module, into: str, readers: list[str], given: Tensor, alpha: float) -> nn.Module:
    """A copy of the model with factors folded into a norm or linear layer and the layers that read it."""
    other = copy.deepcopy(model)
    weights = torch.stack([other.get_submodule(path).weight.abs().amax(0) for path in readers]).amax(0)
    factors = given.abs().amax(0) ** alpha / weights ** (1 - alpha)
    source = other.get_submodule(into)
    with torch.no_grad():
        for parameter in source.parameters():
            parameter.div_(factors[:, None] if parameter.dim() > 1 else factors)
        for path in readers:
            other.get_submodule(path).weight.mul_(factors)
    return other


def input_of(model: nn.Module, path: str, x: Tensor) -> Tensor:
    given = list[Tensor]()
    handle = model.get_submodule(path).register_forward_pre_hook(lambda _, args: given.append(args[0]))
    model(x)
    handle.remove()
    return given[0].detach()


CASES = [
    (lambda: behind(nn.LayerNorm(WIDTH)), "norm", ["left", "right"]),
    (lambda: behind(nn.RMSNorm(WIDTH)), "norm", ["left", "right"]),
    (lambda: behind(Root()), "norm", ["left", "right"]),
    (gated, "up", ["down"]),
]


@pytest.mark.parametrize(("make", "into", "readers"), CASES, ids=["layer norm", "RMS norm", "by hand", "gated"])
def test_the_effect_is_that_of_the_factors_folded_into_the_model(make: Any, into: str, readers: list[str]) -> None:
    model, x = seeded(make), normal(16, WIDTH)
    found = audited(model, x)
    one = layer(found, readers[0])
    assert (one.part, one.cause, one.verdict.verdict) == ("activation", "outlier channel", "unsafe")
    assert (one.remedy, one.remedied) == ("smooth", one.smoothed)

    effects = {}
    for alpha in ALPHAS:
        other = folded(model, into, readers, input_of(model, readers[0], x), alpha)
        torch.testing.assert_close(other(x), model(x), rtol=1e-4, atol=1e-4)
        effects[f"alpha {alpha:g}, folded into `{into}`"] = change(model, by_hand(other, {readers[0]: "int8"}), x)
    assert one.smoothed == pytest.approx(effects[one.smoothing], rel=0.02)
    assert one.smoothed <= 1.3 * min(effects.values())
    assert one.smoothed < 0.25 * one.effect


def test_the_finding_and_the_terminal_say_what_smoothing_gains() -> None:
    found = audited(seeded(lambda: behind(nn.LayerNorm(WIDTH))), normal(16, WIDTH))
    one = layer(found, "left")
    (finding,) = [f for f in found.findings if (f.rule, f.owner) == ("QNT001", "left")]
    gain = (
        f"With a smoothed input ({one.smoothing}), the layer's effect is {one.smoothed:.2g} instead of {one.effect:.2g}"
    )
    assert gain in finding.message
    worst = max(found.quantization, key=lambda each: each.effect)
    said = " ".join(quantization_lines(found))
    assert f"({worst.smoothing}; effect" in said
    assert "which saves 8 bits per weight" in said


def reads_elsewhere(m: Any, x: Tensor) -> Tensor:
    x = m.norm(x)
    return m.out(torch.tanh(m.left(x)) + m.right(x) + x)


@pytest.mark.parametrize("why", ["the sum reads it too", "no module before it"])
def test_where_no_module_absorbs_the_factors_nothing_is_promised(why: str) -> None:
    model = seeded(lambda: behind(nn.LayerNorm(WIDTH)))
    x = normal(16, WIDTH)
    if why == "the sum reads it too":
        model = Model(reads_elsewhere, norm=model.norm, left=model.left, right=model.right, out=model.out)
    else:
        x = model.norm(x).detach()
        model = nn.Sequential(model.left)
    found = audited(model, x)
    one = next(each for each in found.quantization if each.owner in ("left", "0"))
    assert (one.smoothing, one.smoothed) == ("", None)
    assert one.remedy in ("", "keep")


def test_factors_are_not_folded_into_a_weight_that_an_embedding_shares() -> None:
    """The head reads a norm with an outlier channel; factors in its weight would change the embedding."""

    def build() -> nn.Module:
        parts = {"embed": nn.Embedding(48, WIDTH), "norm": nn.LayerNorm(WIDTH), "head": nn.Linear(WIDTH, 48)}
        model = Model(lambda m, ids: m.head(m.norm(m.embed(ids))), **parts)
        model.head.weight = model.embed.weight
        return model

    model = seeded(build)
    with torch.no_grad():
        model.norm.weight[7] *= 200
        model.embed.weight[:, 7] /= 200
    one = layer(audited(model, torch.arange(48).view(4, 12)), "head")
    assert (one.part, one.cause, one.verdict.verdict) == ("activation", "outlier channel", "unsafe")
    assert (one.smoothing, one.remedy) == ("", "keep")
