"""A recorded training step: told in the paths that the model itself knows, the loss apart."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from auditor.errors import CaptureError
from auditor.records import Capture, Subject
from auditor.training.objective import training_subject
from auditor.training.step import LOSS, capture_step, own_loss, step_batches, with_literals_of


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Linear(2, 2)  # a name that the step uses too
        self.tied = self.model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x).tanh()


def loss_fn(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().mean()


@pytest.fixture(scope="module")
def subject() -> Subject:
    return training_subject(Net(), (torch.ones(3, 2), torch.zeros(3, 2)), {}, loss_fn)


@pytest.fixture(scope="module")
def captured(subject: Subject) -> Capture:
    return capture_step(subject, ("fp16",))


def test_owners_are_the_models_own_or_the_loss(captured: Capture) -> None:
    owners = [(node.owner, node.op.split(".")[1]) for node in captured.nodes.values()]
    assert owners == [("model", "linear"), ("", "tanh"), (LOSS, "sub"), (LOSS, "square"), (LOSS, "mean")]


def test_weights_go_by_the_names_of_the_models_state(captured: Capture, subject: Subject) -> None:
    names = {place.fqn for place in captured.placeholders if place.kind == "parameter"}
    assert names == {"model.weight", "model.bias"} <= subject.model.state_dict().keys()
    assert captured.aliases == {"model": ("tied",)}


def test_it_binds_to_the_model_and_to_batches_with_targets(captured: Capture, subject: Subject) -> None:
    values = captured.bind(subject.model, step_batches(subject)[0])
    by_name = {place.fqn or place.kind: value for place, value in zip(captured.placeholders, values, strict=True)}
    assert by_name["model.weight"] is subject.model.model.weight
    assert len(values) == 4  # weight, bias, inputs, targets


def test_one_loss_and_no_more(subject: Subject) -> None:
    assert subject.objective is not None
    both = replace(subject.objective, loss_fn=lambda outputs, targets: (outputs.sum(), targets.sum()))
    with pytest.raises(CaptureError, match="returns one loss"):
        capture_step(replace(subject, objective=both), ())


def test_literals_of_a_capture_that_was_compared(subject: Subject) -> None:
    def guarded(outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs - targets).abs().clamp_min(torch.finfo(outputs.dtype).eps).sum()

    assert subject.objective is not None
    subject = replace(subject, objective=replace(subject.objective, loss_fn=guarded))
    plain, low = capture_step(subject, ()), capture_step(subject, ("fp16",))
    assert (plain.compared, low.compared) == (False, True)
    taken = with_literals_of(plain, low)
    assert taken.compared
    literals = {name: node.literals for name, node in taken.nodes.items() if node.literals}
    assert list(literals) == ["clamp_min"]
    assert list(literals["clamp_min"]["fp16"].arguments.values()) == [2.0**-10]
    assert plain.nodes["clamp_min"].literals == {}


@pytest.mark.parametrize(
    ("loss", "name"),
    [
        (nn.MSELoss(), "torch.nn.MSELoss"),
        (nn.functional.mse_loss, "torch.nn.functional.mse_loss"),
        (partial(nn.functional.huber_loss, delta=2.0), "torch.nn.functional.huber_loss"),
        (torch.dist, "torch.dist"),
    ],
)
def test_a_loss_of_torch_is_named(loss: Any, name: str) -> None:
    found = capture_step(training_subject(Net(), (torch.ones(3, 2), torch.zeros(3, 2)), {}, loss), ("fp16",))
    lost = [node for node in found.nodes.values() if node.owner == LOSS]
    assert lost
    assert {(node.source, node.called_from) for node in lost} == {(None, name)}


def test_a_loss_of_ones_own_has_its_lines() -> None:
    def helper(x: Tensor) -> Tensor:
        return x.abs()

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return helper(outputs - targets).mean() + nn.functional.mse_loss(outputs, targets)

    found = capture_step(training_subject(Net(), (torch.ones(3, 2), torch.zeros(3, 2)), {}, loss), ("fp16",))
    here, line = Path(__file__).name, inspect.getsourcelines(loss)[1] + 1
    lost = {n.op: (n.source, n.called_from) for n in found.nodes.values() if n.owner == LOSS}
    assert lost.pop("aten.abs.default") == (f"{here}:{inspect.getsourcelines(helper)[1] + 1}", f"{here}:{line} in loss")
    assert set(lost.values()) == {(f"{here}:{line}", None)}
    assert "aten.mse_loss.default" in lost


THREE = torch.tensor(3.0)


@dataclass
class Output:
    loss: Tensor | None
    logits: Tensor


@pytest.mark.parametrize(
    ("outputs", "expected"),
    [
        ({"loss": THREE, "logits": None}, 3.0),
        (Output(THREE, torch.ones(2)), 3.0),
        (torch.tensor([[3.0]]), 3.0),
        (Output(None, torch.ones(2)), None),
        (torch.ones(2), None),
        ({"logits": THREE}, None),
    ],
)
def test_a_models_own_loss(outputs: Any, expected: float | None) -> None:
    found = own_loss(outputs)
    assert (None if found is None else found.item()) == expected
