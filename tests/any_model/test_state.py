"""Models that write to themselves and to what holds them: all of it comes back after an audit."""

import itertools
import json
import runpy
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import auditor
from auditor import cli
from auditor.emulation.emulate import emulate_unless_native
from auditor.errors import AuditorError
from auditor.isolation.run_model import run_model
from auditor.numerics.metrics import output_error
from tests.any_model.holding import Two, held
from tests.support.refusing import refused
from tests.support.replaying import Model, linear
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


class AddsTheChange(nn.Module):
    """What it returns depends on the call before, but not if that call had the same tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head, self.last = nn.Embedding(50, 8), nn.Linear(8, 4), torch.empty(0)

    def forward(self, ids: Tensor) -> Any:
        now = self.table(ids)
        change, self.last = now - (self.last if self.last.numel() else now), now.detach()
        return self.head(now + change)


def test_state_that_only_other_tokens_show_is_said() -> None:
    ids = torch.arange(12).reshape(2, 6)
    audit = auditor.audit(seeded(AddsTheChange).eval(), (ids,), formats=("bf16",), device="cpu")
    assert any("keeps state between calls" in warning for warning in audit.warnings)


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
    audit = held(lambda: (seeded(ByDevice).eval(), ((normal(2, 6, 8),), {})), objective="flops")
    assert all(plan.is_verified and plan.low_precision_flops == 1 for plan in audit.plans.values())


# Models that compute later or elsewhere: generators as results, memories that hold weakly, threads.


def steps(m: Any, x: Tensor) -> Iterator[Tensor]:
    for _ in range(3):
        x = m.layer(x).tanh()
        yield x


@pytest.mark.parametrize("function", [steps, lambda m, x: map(m.layer, [x, -x])])
def test_what_is_computed_while_it_is_read_is_computed_under_autocast(function: Any) -> None:
    audit = held(lambda: (Model(function, layer=linear(8, 8)), ((X,), {})))
    plan = audit.plans["autocast_bf16"]
    assert plan.is_verified
    assert plan.low_precision_flops == 1
    assert plan.measured_error > 1e-4  # BF16 keeps 8 bits: nothing low would be 0


class Key:
    """Can be referred to weakly."""


def remembered(m: Any, x: Tensor) -> Any:
    if m.key not in m.norms:
        m.norms[m.key] = m.layer.weight.detach().norm()
    return m.layer(x) / m.norms[m.key]


def test_a_memory_that_holds_weakly() -> None:
    def build() -> nn.Module:
        return Model(remembered, layer=linear(8, 8), key=Key(), norms=weakref.WeakKeyDictionary())

    held(lambda: (build(), ((X,), {})))


def test_modules_that_run_in_other_threads_are_said_to_be_left_out() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        with ThreadPoolExecutor(1) as pool:
            beside = pool.submit(m.second, x)
            return m.first(x) + beside.result()

    audit = held(lambda: (Model(forward, first=linear(8, 8), second=linear(8, 8, seed=1)), ((X,), {})))
    assert any("in other threads" in warning for warning in audit.warnings)
    assert {report.node.owner for report in audit.nodes} == {"", "first"}


# Lazy layers of a file: their first weights come from a first call, the same ones in the process that verifies.

MODEL = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.last = nn.LazyConv2d(4, 3), nn.LazyBatchNorm2d(), nn.LazyLinear(4)

    def forward(self, x):
        x.mul_(0.5)  # the caller's own, at every call
        return self.last(self.norm(self.conv(x)).flatten(1).relu())

def get_inputs(): return torch.randn(2, 3, 5, 5)
"""


def test_plans_of_lazy_layers_are_verified_and_hold(here: Path) -> None:
    Path("model.py").write_text(MODEL)
    words = ("model.py", "--formats", "bf16", "--strategies", "cast", "--out", "out", "-q", "--fail-on", "never")
    assert cli.main(words) == 0
    (plan,) = json.loads(Path("out/plan.json").read_text())["plans"].values()
    assert plan["verification"]["holds"], plan["verification"]["failure"]
    patched = SimpleNamespace(**runpy.run_path("out/patched_model.py"))
    with pytest.raises(ValueError, match=r"conv\.weight has no shape yet: call the model once"):
        patched.build(plan="cast_bf16")
    torch.manual_seed(0)
    x = torch.randn(2, 3, 5, 5)
    model = patched.original().eval()
    torch.manual_seed(0)
    with torch.no_grad():
        model(x.clone())
    expected = run_model(model, ((x,), {}))
    found = run_model(patched.apply(model, "cast_bf16"), ((x,), {}), around=lambda: emulate_unless_native("cpu"))
    assert output_error(expected, found) == pytest.approx(plan["verification"]["measured_error"], rel=1e-6)


def test_a_plan_for_a_model_without_weights_is_refused_in_one_line() -> None:
    audit = auditor.audit(nn.Linear(2, 2), torch.ones(1, 2), formats=("bf16",), strategies=("cast",), device="cpu")
    with refused(AuditorError, "lazy-weights", match="call the model once"):
        auditor.apply(nn.LazyLinear(2), audit, "cast_bf16")
