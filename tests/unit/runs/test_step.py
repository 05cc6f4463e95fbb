"""A training step as a module: which loss it takes, and that gradients are on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from auditor.records import Objective
from auditor.runs.step import TrainingStep, own_loss, step_batches
from tests.subjects import subject_of

X = torch.tensor(3.0)


@dataclass
class Output:
    loss: Tensor | None
    logits: Tensor


@pytest.mark.parametrize(
    ("outputs", "expected"),
    [
        ({"loss": X, "logits": None}, 3.0),
        (Output(X, torch.ones(2)), 3.0),
        (torch.tensor([[3.0]]), 3.0),
        (Output(None, torch.ones(2)), None),
        (torch.ones(2), None),
        ({"logits": X}, None),
    ],
)
def test_a_models_own_loss(outputs: Any, expected: float | None) -> None:
    found = own_loss(outputs)
    assert (None if found is None else found.item()) == expected


def test_the_loss_of_outputs_and_targets_by_position_and_by_name() -> None:
    step = TrainingStep(nn.Identity(), lambda outputs, targets, weight: ((outputs - targets) * weight).sum())
    loss = step((torch.tensor([5.0, 7.0]),), {}, (torch.tensor([1.0, 2.0]),), {"weight": 10.0})
    assert loss.item() == 90.0  # 10 (4 + 5)


def test_gradients_are_on_whoever_runs_it() -> None:
    step = TrainingStep(nn.Linear(1, 1), None)
    with torch.no_grad():
        assert step((torch.ones(1, 1),), {}, (), {}).requires_grad


def test_batches_with_their_targets() -> None:
    subject = subject_of(nn.Identity(), torch.ones(1), flag=True)
    targets = ((torch.zeros(1),), {"weight": 2.0})
    step = type(subject)(**{**vars(subject), "objective": Objective(None, (targets,), "given")})
    ((args, kwargs),) = step_batches(step)
    assert (args, kwargs) == ((*subject.batches[0], *targets), {})
