"""Runs of the user's own model leave it as it was, whatever they convert."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from auditor.runs.answer import answer, stored_in
from tests.subjects import normal, seeded


class Gradients(nn.Module):
    """Says whether gradients are enabled."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (2.0 if torch.is_grad_enabled() else 1.0)


def test_gradients_are_off_unless_asked_for() -> None:
    x = torch.ones(2)
    assert answer(Gradients(), ((x,), {}))[0].tolist() == [1.0, 1.0]
    assert answer(Gradients(), ((x,), {}), gradients=True)[0].tolist() == [2.0, 2.0]


def test_a_model_stored_low_comes_back_with_its_gradients() -> None:
    model = seeded(lambda: nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)))  # type: ignore[arg-type]
    model(normal(4, 3)).sum().backward()
    tensors = [x for p in model.parameters() for x in (p.data, p.grad)] + list(model.buffers())
    before = [x.clone() for x in tensors]
    with stored_in(model, torch.float16):
        assert {p.dtype for p in model.parameters()} == {torch.float16}
        assert all(p.grad is None for p in model.parameters())
    after = [x for p in model.parameters() for x in (p.data, p.grad)] + list(model.buffers())
    assert [x.data_ptr() for x in after] == [x.data_ptr() for x in tensors]
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))


@pytest.mark.parametrize("compiled_before", [False, True])
def test_a_cond_runs_eagerly_whether_or_not_something_was_compiled(compiled_before: bool) -> None:
    if compiled_before:
        torch.compile(torch.sin, backend="eager")(torch.ones(2))

    large = nn.Linear(1024, 1024)  # beyond what is copied at once, so that writes are watched for

    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.large = large

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = torch.cond(x.sum() > 0, lambda y: y.exp(), lambda y: y.tanh(), (x,))
            return result

    (found,) = answer(Branching().eval(), ((torch.ones(2),), {}))
    assert torch.equal(found, torch.ones(2).exp())
