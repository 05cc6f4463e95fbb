"""The patched model under the emulation answers what the recording answers under the plan's policy.

`benchmarks/emulation.py` does the same for the corpora, the examples and the architectures.
"""

import random
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from auditor.records import Batch, Capture
from tests.corpus.catalogue import INFERENCE
from tests.support.replaying import Model
from tests.support.resisting import MODELS as RESISTING
from tests.support.small_models import MODELS as SMALL
from tests.support.subjects import FORMATS, capture_of, normal, seeded
from tests.support.two_ways import Labels, difference, drawn, emulated_answer, everything, replayed_answer

CLOSE = 1e-6
CORPUS = {case.name: case for case in INFERENCE}


def follows_another() -> nn.Module:
    """Positions in the dtype of what a layer norm returns: FP32 on CUDA, under autocast too."""

    def forward(m: Any, x: Tensor) -> Tensor:
        x = m.norm(m.lin(x))
        return m.lin(x + m.positions.to(dtype=x.dtype))

    return Model(forward, norm=nn.LayerNorm(8), lin=nn.Linear(8, 8), positions=normal(4, 8, seed=1))


class FollowsAProduct(nn.Module):
    """A factor in the dtype of what a linear layer returns: low under autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.lin(x)
        return x * torch.sqrt(torch.tensor(24.0)).to(dtype=x.dtype)


class Transforms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.vmap(lambda v: self.second(torch.softmax(3 * self.first(v), -1)))(x)


class Differentiates(Transforms):
    """In a plan with scopes the gradient's products are low where the layer is; in the recording they are the model's own."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + torch.func.jacrev(lambda y: torch.tanh(self.first(y)))(x[0])[:4]


class Statistics(nn.Module):
    """Returns one value, and leaves others in attributes: no plan that wraps it converts those."""

    def forward(self, x: Tensor) -> Tensor:
        self.mean, self.size = x.mean(-1, keepdim=True), 3 * x.abs()
        return x - self.mean


class ReadsAttributes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.statistics, self.after = nn.Linear(8, 8), Statistics(), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.after(self.statistics(self.before(x)))
        return y / 7 + self.statistics.mean, self.statistics.size


_KINDS = (ReadsAttributes, follows_another, FollowsAProduct, Transforms, Differentiates)
OWN: dict[str, type[nn.Module]] = {kind.__name__: kind for kind in _KINDS}
NAMES = [*OWN, *SMALL, *RESISTING, *CORPUS]


def built(name: str) -> tuple[nn.Module, Batch]:
    if name in OWN:
        return seeded(OWN[name]), ((normal(4, 8),), {})
    if name in SMALL:
        return seeded(SMALL[name][0]), (SMALL[name][1], {})
    if name in CORPUS:
        model, inputs = CORPUS[name].build()
        return model.eval(), (tuple(inputs), {})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model, batch = RESISTING[name]()
    return model.eval(), batch


@cache
def known(name: str) -> tuple[nn.Module, Batch, Capture]:
    model, batch = built(name)
    return model, batch, capture_of(model, *batch[0], **batch[1])


def assert_alike(name: str, strategy: str, fmt: str, labels: Labels) -> None:
    model, batch, capture = known(name)
    run = emulated_answer(model, capture, batch, strategy, fmt, labels)
    replay = replayed_answer(model, capture, batch, strategy, fmt, labels)
    assert difference(run, replay) <= CLOSE, (run if isinstance(run, str) else "", replay, labels)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("strategy", ["autocast", "cast"])
@pytest.mark.parametrize("name", NAMES)
def test_everything_low(name: str, strategy: str, fmt: str) -> None:
    assert_alike(name, strategy, fmt, everything(known(name)[2], fmt))


@pytest.mark.parametrize("strategy", ["autocast", "cast"])
@pytest.mark.parametrize("name", [name for name in NAMES if name != "Differentiates"])
def test_any_scopes(name: str, strategy: str) -> None:
    rnd = random.Random(f"{name} {strategy}")
    for fmt in FORMATS:
        assert_alike(name, strategy, fmt, drawn(known(name)[2], strategy, fmt, rnd))
