"""Errors are stated as they are by hand: per gradient mode, since kernels differ, and no finer than FP32 repeats itself."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.any_model.holding import Build, Call, held


class Ends(nn.Module):
    """A projection, and what a function makes of it."""

    def __init__(self, ends: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.projection, self.ends = nn.Linear(16, 16), ends

    def forward(self, x: Tensor) -> Tensor:
        return self.ends(self.projection(x))


class Dropping(nn.Module):
    """An LSTM that drops between its layers whatever the model's mode is."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(16, 16, 2, dropout=0.3, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        self.lstm.train()
        return self.lstm(x)[0]


def built(make: Callable[[], nn.Module], *shape: int) -> Build:
    def build() -> tuple[nn.Module, Call]:
        torch.manual_seed(0)
        model = make()
        return model, ((torch.randn(*shape),), {})

    return build


@pytest.mark.parametrize(
    "ends",
    [
        torch.linalg.svdvals,
        lambda h: torch.linalg.eigvalsh(h.T @ h + torch.eye(16)),
        lambda h: torch.linalg.matrix_norm(h, "nuc"),
        torch.linalg.cond,
    ],
    ids=["svdvals", "eigvalsh", "nuclear", "cond"],
)
def test_kernels_that_differ_with_gradients_have_an_error_each(ends: Callable[[Tensor], Tensor]) -> None:
    audit = held(built(lambda: Ends(ends), 8, 16))
    for plan in audit.plans.values():
        assert plan.verification is not None
        assert plan.verification.with_gradients != plan.measured_error
        assert plan.verification.with_gradients == pytest.approx(plan.measured_error, rel=0.05)


def test_a_recurrent_layer_that_drops_whatever_the_mode() -> None:
    held(built(Dropping, 2, 6, 16))


def test_what_rounds_as_its_memory_lies_states_how_far_fp32_is_from_itself() -> None:
    def solved(h: Tensor) -> Tensor:
        return torch.linalg.lstsq(h.T, h.T[:, :3] + 1).solution

    held(built(lambda: Ends(solved), 8, 16), in_fp32=1e-6)
