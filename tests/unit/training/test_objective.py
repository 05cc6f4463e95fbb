"""Where loss and targets come from, in every form that is documented, and what is said where they are missing."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from auditor.errors import AuditorError
from auditor.training.objective import split, training_subject
from auditor.training.step import TrainingStep, step_batches

X, Y = torch.ones(4, 3), torch.zeros(4, 2)


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return self.layer(x) if bias is None else self.layer(x) + bias


class WithLoss(Pair):
    def forward(self, x: Tensor, labels: Tensor) -> Any:  # as Hugging Face models do
        y = self.layer(x)
        return SimpleNamespace(logits=y, loss=F.mse_loss(y, labels))


def whole(outputs: Tensor, batch: Any) -> Tensor:
    target = batch["labels"] if isinstance(batch, dict) else batch[-1]
    return F.mse_loss(outputs, target)


def named(outputs: Tensor, labels: Tensor, weight: float = 1.0) -> Tensor:
    return weight * F.mse_loss(outputs, labels)


@pytest.mark.parametrize(
    ("loss", "batch"),
    [
        (nn.MSELoss(), (X, Y)),
        (F.mse_loss, (X, Y)),
        (named, (X, Y)),
        (named, {"x": X, "labels": Y}),
        (lambda outputs, *targets: F.mse_loss(outputs, targets[0]), (X, None, Y)),
        (lambda outputs: outputs.square().mean(), (X,)),
    ],
    ids=["module", "function", "positional", "mapping", "variadic", "no target"],
)
def test_targets_are_found_in_the_batch(loss: Callable[..., Any], batch: Any) -> None:
    model = Pair()
    subject = training_subject(model, batch, {}, loss)
    (only,) = step_batches(subject)
    assert float(TrainingStep(model, loss)(*only[0])) == pytest.approx(float(model(X).square().mean()))


def test_a_parameter_called_batch_is_given_all_of_it() -> None:
    inputs, targets = split([((X, Y), {})], whole, Pair())
    assert inputs == (((X, Y), {}),)
    assert targets[0] == (((X, Y),), {})


def test_the_models_own_loss() -> None:
    subject = training_subject(WithLoss(), {"x": X, "labels": Y}, {}, None)
    assert subject.objective is not None
    assert subject.objective.source == "the model's own loss"


@pytest.mark.parametrize(
    ("model", "batch", "loss", "slug", "says"),
    [
        (Pair(), X, None, "no-loss", r"loss_fn \(--loss F.py:NAME"),
        (Pair(), X, nn.MSELoss(), "bad-targets", "target"),
        (Pair(), {"x": X}, named, "bad-targets", "'labels'"),
        (Pair(), (X, torch.zeros(9, 9)), nn.MSELoss(), "bad-loss", "must match"),
        (Pair(), (X, Y), nn.MSELoss(reduction="none"), "bad-loss", "one floating-point number"),
        (Pair(), (X, Y), lambda o, t: (o - t).log().mean() * float("nan"), "bad-loss", "nan in FP32"),
        (Pair().requires_grad_(False), (X, Y), nn.MSELoss(), "no-gradient", "unfreeze"),
    ],
    ids=["none", "no target", "no label", "shape", "not scalar", "nan", "frozen"],
)
def test_what_is_wrong_is_said_in_one_line(model: nn.Module, batch: Any, loss: Any, slug: str, says: str) -> None:
    with pytest.raises(AuditorError, match=says) as caught:
        training_subject(model, batch, {}, loss)
    assert caught.value.slug == slug
    assert "\n" not in str(caught.value)
