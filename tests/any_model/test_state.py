"""Models that write to themselves, to what holds them and to what they are given: all of it comes back after an audit."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import auditor
from tests.any_model.holding import Two, held
from tests.support.subjects import normal, seeded

X = normal(4, 8)
CALLS = 0


class CarriesATensor(Two):
    def __init__(self) -> None:
        super().__init__()
        self.hidden = torch.zeros(8)

    def forward(self, x: Tensor) -> Any:
        self.hidden = self.hidden * 0.5 + self.first(x).mean(0)
        return self.second(x + self.hidden)


class CountsInAGlobal(Two):
    def forward(self, x: Tensor) -> Any:
        global CALLS
        CALLS += 1
        return super().forward(x) / CALLS


class LearnsInForward(Two):
    def forward(self, x: Tensor) -> Any:
        with torch.enable_grad():
            self.first(x).square().mean().backward()
        with torch.no_grad():
            for parameter in self.first.parameters():
                parameter -= 0.1 * parameter.grad
                parameter.grad = None
        return super().forward(x)


class StartsFromItsData(Two):
    ready = False

    def forward(self, x: Tensor) -> Any:
        if not self.ready:
            with torch.no_grad():
                self.first.bias.sub_(self.first(x).mean(0))
            self.ready = True
        return super().forward(x)


HISTORY = [CarriesATensor, LearnsInForward]
BENIGN = [StartsFromItsData]


@pytest.mark.parametrize("kind", [*HISTORY, *BENIGN])
def test_state_comes_back_and_history_is_said(kind: type[nn.Module]) -> None:
    audit = held(lambda: (seeded(kind).eval(), ((X.clone(),), {})), formats=("bf16",))
    assert any("keeps state between calls" in warning for warning in audit.warnings) is (kind in HISTORY)


def test_state_that_is_not_put_back_is_said() -> None:
    audit = auditor.audit(seeded(CountsInAGlobal).eval(), (X,), formats=("bf16",), device="cpu")
    (warning,) = (warning for warning in audit.warnings if "keeps state between calls" in warning)
    assert "closures, globals, caches and iterators is not restored" in warning


class Generates(Two):
    """No copy of a generator is to be had."""

    def __init__(self, decay: float = 1.1) -> None:
        super().__init__()
        self.steps = (decay**step for step in itertools.count())

    def forward(self, x: Tensor) -> Any:
        return super().forward(x) * next(self.steps)


def test_what_cannot_be_put_back_is_said() -> None:
    audit = auditor.audit(seeded(Generates).eval(), (X,), formats=("bf16",), device="cpu")
    (said,) = (warning for warning in audit.warnings if "is not reproducible" in warning)
    noise = max(plan.verification.noise for plan in audit.plans.values())
    assert f"differ by {noise:.2g}" in said
    assert noise > 0.1
    assert not any(plan.is_verified for plan in audit.plans.values())
    steady = auditor.audit(seeded(lambda: Generates(1.0)).eval(), (X,), formats=("bf16",), device="cpu")
    assert not any("is not reproducible" in warning for warning in steady.warnings)
    assert steady.plans["autocast_bf16"].is_verified


class Takes(Two):
    def forward(self, given: Any) -> Any:
        given["x"].mul_(2)
        given["list"].append(self.first(given.pop("x")))
        return self.second(given["list"][-1]), given


def test_containers_of_the_caller_come_back() -> None:
    given: dict[str, Any] = {"x": X.clone(), "list": [normal(4, 8, seed=1)]}
    x, kept = given["x"], given["list"]
    auditor.audit(seeded(Takes).eval(), (given,), device="cpu", formats=("fp16",))
    assert list(given) == ["x", "list"] and given["x"] is x and given["list"] is kept and len(kept) == 1
    assert torch.equal(x, X) and torch.equal(kept[0], normal(4, 8, seed=1))
    held(lambda: (seeded(Takes).eval(), (({"x": X.clone(), "list": [X.clone()]},), {})), formats=("fp16",))
