"""Models that hold or are given half-precision tensors: these come back bit for bit, and what is verified holds by hand."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import auditor
from tests.support.subjects import normal, seeded


class HalfInput(nn.Module):
    """Raises what it is given, as a model behind a half-precision data loader does."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(32, 24), nn.Linear(24, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.first(x.float())))


class HalfBuffer(nn.Module):
    """Multiplies by a table that its author keeps in BF16; were it zero, nothing could go wrong behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(32, 24), nn.Linear(24, 8, bias=False)
        self.register_buffer("table", normal(24, seed=3).bfloat16())

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.first(x) * self.table))


class HalfProduct(nn.Module):
    """Its author runs one product in half, and softmax on the result in half too."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype, self.first, self.last = dtype, nn.Linear(32, 32), nn.Linear(24, 8)
        self.weight = nn.Parameter(normal(32, 24, seed=4) / 8)

    def forward(self, x: Tensor) -> Tensor:
        product = self.first(x).to(self.dtype) @ self.weight.to(self.dtype)
        return self.last(torch.softmax(product, -1).float())


class HalfProductFp16(HalfProduct):
    def __init__(self) -> None:
        super().__init__(torch.float16)


CASES = {
    "input in BF16": (HalfInput, torch.bfloat16),
    "buffer in BF16": (HalfBuffer, torch.float32),
    "product in FP16": (HalfProductFp16, torch.float32),
}


@pytest.mark.parametrize(("model_class", "dtype"), CASES.values(), ids=CASES)
def test_tensors_stay_and_verified_plans_hold(model_class: Callable[[], nn.Module], dtype: torch.dtype) -> None:
    model, x = seeded(model_class), normal(16, 32).to(dtype)
    given = copy.deepcopy((x, dict(model.named_parameters()), dict(model.named_buffers())))
    expected = model(x).detach()
    audit = auditor.audit(model, (x,), device="cpu")
    for before, after in zip(
        [given[0], *given[1].values(), *given[2].values()], [x, *model.parameters(), *model.buffers()], strict=True
    ):
        assert torch.equal(before.detach(), after.detach())
    for plan in audit.plans.values():
        assert plan.verification is not None and plan.verification.failure is None
        if plan.strategy == "cast" and plan.verified:
            found = auditor.apply(copy.deepcopy(model), plan)(x).detach().double()
            error = float((found - expected).norm() / expected.norm())
            assert plan.measured_error is not None
            assert error <= 2 * plan.measured_error + 1e-6
    assert any(plan.verified and plan.measured_error for plan in audit.plans.values())
