"""The recorded step has the gradients of the model's own `loss.backward()`, wherever the model stops or bends them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from auditor.execution.step import bind_step, run_step
from auditor.training.objective import in_training, training_subject
from auditor.training.step import capture_step, step_batches
from tests.support.subjects import normal, seeded


class Layers(nn.Module):
    """Two layers with something between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 1)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.between(self.first(x))).square().mean()

    def between(self, h: Tensor) -> Tensor:
        raise NotImplementedError


class Detached(Layers):
    def between(self, h: Tensor) -> Tensor:
        return h * h.detach().exp()


class StraightThrough(Layers):
    def between(self, h: Tensor) -> Tensor:
        return h + (h.round() - h).detach()


class Without(Layers):
    def between(self, h: Tensor) -> Tensor:
        with torch.no_grad():
            scale = h.abs().mean() + self.first.weight.norm()
        return h / scale


class Tracking(Layers):
    """A moving mean is kept by hand, and read at once."""

    def between(self, h: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.mul_(0.9).add_(h.mean(0), alpha=0.1)
        return h - self.mean


class Checkpointed(Layers):
    def between(self, h: Tensor) -> Tensor:
        return checkpoint(lambda y: torch.tanh(y).exp(), h, use_reentrant=False)


class CheckpointedTwice(Layers):
    """The other kind runs its forward in an autograd.Function."""

    def between(self, h: Tensor) -> Tensor:
        return checkpoint(lambda y: torch.tanh(y).exp(), h, use_reentrant=True)


class Dropping(Layers):
    def between(self, h: Tensor) -> Tensor:
        return F.dropout(h, 0.5, self.training)


class InPlace(Layers):
    def between(self, h: Tensor) -> Tensor:
        h = h.clone()
        h[:, :2] *= 3
        return F.relu_(h)


@pytest.mark.parametrize(
    "kind", [Detached, StraightThrough, Without, Tracking, Checkpointed, CheckpointedTwice, Dropping, InPlace]
)
def test_a_replay_has_the_gradients_of_the_run(kind: type[Layers]) -> None:
    model, x = seeded(kind), normal(6, 4)
    subject = training_subject(model, x, {}, None)
    with in_training(model):
        captured = capture_step(subject, (), seed=3)
        step = run_step(bind_step(captured, subject, step_batches(subject)[0], seed=3))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            model(x).backward()
    for name, parameter in model.named_parameters():
        assert torch.allclose(step.by_parameter[name], parameter.grad, rtol=1e-5, atol=1e-7), name
        assert bool(parameter.grad.any()) or name == "first.bias"


def test_a_step_runs_on_copies_of_what_the_model_holds() -> None:
    model = seeded(InPlace)
    model.first.bias.requires_grad_(False)
    subject = training_subject(model, normal(6, 4), {}, None)
    with in_training(model):
        captured = capture_step(subject, (), seed=3)
        step = bind_step(captured, subject, step_batches(subject)[0], seed=3)
    held = {x.data_ptr() for x in (*model.parameters(), *model.buffers())}
    assert held.isdisjoint(x.data_ptr() for x in step.flat if isinstance(x, Tensor))
    assert set(step.parameters) == {"first.weight", "second.weight", "second.bias"}  # a frozen one is no leaf of it
