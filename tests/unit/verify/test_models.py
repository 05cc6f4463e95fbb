"""Plans of models with habits, verified: what the audit states is what a patched model does when it is called by hand."""

from __future__ import annotations

import copy
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

import auditor
from auditor.capture.emulation import emulate
from auditor.isolation.outputs import tensor_outputs
from auditor.isolation.process import reseed
from auditor.numerics.metrics import output_error
from tests.support.subjects import normal


class Noisy(nn.Module):
    """Drops entries in evaluation, adds noise in place, and chooses softly among columns."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.out = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = F.dropout(self.lin(x), 0.3, training=True)
        y = y + torch.empty_like(y).normal_() * 0.1
        return self.out(y) + F.gumbel_softmax(y, tau=1.0)


class Products(nn.Module):
    """Multiplies in the root and in a child, so that a plan that wraps one of them alone shows."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.matmul(self.lin(x).relu(), x.t())


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "noisy": (Noisy, (4, 8)),
    "graph module": (lambda: fx.symbolic_trace(Products()), (4, 8)),
}


def made(name: str) -> nn.Module:
    """The model with the same weights every time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return MODELS[name][0]()


def called(model: nn.Module, x: Tensor, *, low: bool) -> list[Tensor]:
    """As a user calls it, on a GPU or its emulation where it is low."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        reseed(0)
        if not low:
            return tensor_outputs(model(x.clone()))
        with emulate("cuda"):
            return tensor_outputs(model(x.clone()))


@pytest.mark.parametrize("name", MODELS)
def test_stated_errors_are_those_of_runs_by_hand(name: str) -> None:
    x = normal(*MODELS[name][1])
    audit = auditor.audit(made(name), x, device="cpu", formats=("bf16",))
    reference = called(made(name), x, low=False)

    def by_hand(model: nn.Module, x: Tensor) -> Any:
        return pytest.approx(output_error(reference, called(model, x, low=True)), rel=1e-6)

    for plan in audit.plans.values():
        assert plan.verified, plan.verification
        assert plan.measured_error == by_hand(auditor.apply(made(name), audit, plan.name), x), plan.name
        assert 0 < plan.measured_error < 0.01, plan.name
    with torch.autocast("cpu", enabled=False):
        assert audit.baselines["cast_bf16"].measured_error == by_hand(made(name).bfloat16(), x.bfloat16())

    class Region(nn.Module):
        def forward(self, x: Tensor) -> Any:
            with torch.autocast("cuda", dtype=torch.bfloat16):
                return inner(x)

    inner = made(name)
    assert audit.baselines["autocast_bf16"].measured_error == by_hand(Region(), x)


def test_a_model_that_depends_on_values_takes_its_own_path_low(root: Path) -> None:
    # The second batch leaves by the early exit; the others are iterated to a tolerance, in each precision in its own
    # number of steps.
    example = runpy.run_path(str(root / "examples" / "06_value_dependent.py"))
    model, batches = example["get_model"](), example["get_eval_inputs"]()
    references = [called(model, x, low=False) for (x,) in batches]
    audit = auditor.audit(model, batches, device="cpu", strategies="cast", formats="bf16", max_error=0.05)
    assert audit.capture_method == "path"
    for name, plan in audit.plans.items():
        patched = auditor.apply(copy.deepcopy(model), audit, name)
        by_hand = [output_error(r, called(patched, x, low=True)) for r, (x,) in zip(references, batches, strict=True)]
        assert plan.verified, plan.verification
        assert plan.measured_error == pytest.approx(max(by_hand), rel=1e-6)
    low = copy.deepcopy(model).bfloat16()
    plain = [output_error(r, called(low, x.bfloat16(), low=True)) for r, (x,) in zip(references, batches, strict=True)]
    assert audit.baselines["cast_bf16"].measured_error == pytest.approx(max(plain), rel=1e-6)
