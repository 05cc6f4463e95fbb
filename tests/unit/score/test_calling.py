"""The function is called on the model, its numbers are taken as they come, and nothing of the model stays changed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from auditor.score import NoScore, ScoreResult, Scoring, given_by

INPUTS = torch.linspace(-1, 1, 12).reshape(6, 2)


def net() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(2, 2).eval()


def scored(function: Any, model: nn.Module | None = None, **how: Any) -> ScoreResult:
    return given_by(Scoring(function, "score"), model or net(), **how)


def test_an_iterable_is_a_number_for_each_sample_or_batch() -> None:
    def batches(model: nn.Module) -> Iterator[Tensor]:
        for x in INPUTS.split(2):
            yield model(x).sum()

    found = scored(batches)
    assert not found.single
    assert found.calls == 3
    assert found.values == tuple(net()(x).sum().item() for x in INPUTS.split(2))


@pytest.mark.parametrize(
    "value", [0.5, 1, True, torch.tensor(0.5), torch.tensor([[0.5]]), np.float64(0.5), np.array(0.5)]
)
def test_a_number_by_itself_is_one(value: Any) -> None:
    found = scored(lambda model: value)
    assert found.single
    assert found.values == (float(value),)
    assert found.calls == 0


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (None, "is nothing: a score is a number"),
        ("0.5", "is a str"),
        ({"accuracy": 0.5}, "is a dict"),
        (float("nan"), "what the function gave is nan: a score is finite"),
        (torch.zeros(2, 2), "is a tensor of shape [2, 2]"),
        ([], "gave no number at all"),
        ([0.5, None], "number 1 is nothing"),
        ([torch.zeros(2), torch.tensor([0.0, float("nan")])], "number 3 is nan"),
        ([torch.zeros(1, 2)], "number 0 is a tensor of shape [1, 2]"),
    ],
)
def test_nonsense_is_said_to_be_none(value: Any, why: str) -> None:
    with pytest.raises(NoScore) as caught:
        scored(lambda model: value)
    assert why in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_the_function_raises_is_one_line_with_its_place() -> None:
    def broken(model: nn.Module) -> float:
        raise KeyError("labels\nand more")

    def leaving(model: nn.Module) -> float:
        raise SystemExit(3)

    def late(model: nn.Module) -> Iterator[float]:
        yield 1.0
        raise ValueError("no more")

    with pytest.raises(NoScore, match=r"^the function raised KeyError: .*\(test_calling.py:\d+\)$"):
        scored(broken)
    with pytest.raises(NoScore, match=r"^the function raised SystemExit: 3"):
        scored(leaving)
    with pytest.raises(NoScore, match=r"^the function raised ValueError: no more"):
        scored(late)


def test_one_that_never_ends_is_ended_where_it_calls_the_model_or_gives_a_number() -> None:
    def endless(model: nn.Module) -> Iterator[float]:
        while True:
            yield 1.0

    def waiting(model: nn.Module) -> float:
        while True:
            model(INPUTS)

    for function in (endless, waiting):
        start = time.monotonic()
        with pytest.raises(NoScore, match=r"no score within 0.2 seconds"):
            scored(function, limit=0.2)
        assert time.monotonic() - start < 5
    with pytest.raises(NoScore, match="gave more numbers than in FP32, where it gave 3"):
        scored(endless, most=3)


class Counting(nn.Module):
    """A model that remembers its calls, in a buffer and beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("calls", torch.zeros(()))
        self.seen: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(float(self.calls))
        return x * self.weight + self.calls


def test_the_model_and_the_tensors_that_the_function_holds_come_back() -> None:
    model, metric = Counting(), {"total": torch.zeros(())}
    generator = torch.random.get_rng_state()

    def keeping(model: nn.Module) -> Iterator[float]:
        for x in INPUTS:
            metric["total"] += model(x).sum()
            yield metric["total"] + torch.rand(())

    first, second = scored(keeping, model), scored(keeping, model)
    assert first == second
    assert (float(model.calls), model.seen, float(metric["total"])) == (0.0, [], 0.0)
    torch.testing.assert_close(torch.random.get_rng_state(), generator, rtol=0, atol=0)


def two_layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)).eval()


def halved(net: nn.Module) -> float:
    return float(net.half()(INPUTS.half()).sum())


def loaded(net: nn.Module) -> float:
    net.load_state_dict({name: torch.zeros_like(x) for name, x in net.state_dict().items()})
    return float(net(INPUTS).sum())


def replaced(net: Any) -> float:
    net[0] = nn.Identity()
    return float(net(INPUTS).sum())


@pytest.mark.parametrize("function", [halved, loaded, replaced])
def test_a_function_that_changes_the_model_is_found(function: Callable[[nn.Module], float]) -> None:
    net = two_layers()
    before = {name: x.clone() for name, x in net.state_dict().items()}
    with pytest.raises(NoScore, match=r"^the function changed the model \((parameter|module) '"):
        scored(function, net)
    if function is halved:
        return
    for name, x in net.state_dict().items():
        torch.testing.assert_close(x, before[name], rtol=0, atol=0)
