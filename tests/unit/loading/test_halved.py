"""Half of the samples, where a model answers for each alone."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from auditor.loading.halved import halved, samples
from auditor.records import Subject
from auditor.records.graph import Objective
from tests.subjects import normal, subject_of


def half_of(subject: Subject) -> Subject:
    found = halved(subject, 0)
    assert found is not None
    return found


class Scaled(nn.Module):
    """One input has no rows of its own."""

    def forward(self, x: Tensor, scale: Tensor, *, mask: Tensor) -> tuple[Tensor, Tensor]:
        return (x * scale).masked_fill(mask, 0.0), scale


class Mixed(nn.Module):
    """Normalises over the batch."""

    def forward(self, x: Tensor) -> Tensor:
        return x / x.norm()


class Counted(nn.Module):
    """Takes four samples, and no other number of them."""

    def forward(self, x: Tensor) -> Tensor:
        return x.view(4, -1)


def test_every_input_with_rows_is_cut_and_no_other() -> None:
    x, scale, mask = normal(6, 3), torch.ones(3), torch.zeros(6, 3, dtype=torch.bool)
    (args, kwargs), *_ = half_of(subject_of(Scaled(), x, scale, mask=mask)).batches
    assert torch.equal(args[0], x[:3]) and kwargs["mask"].shape == (3, 3)
    assert args[1] is scale


def test_held_out_batches_and_targets_are_cut_as_well() -> None:
    subject = subject_of(nn.Linear(4, 2), normal(5, 4))
    subject = replace(subject, held_out=(((normal(3, 4),), {}),))
    subject = replace(subject, objective=Objective(None, (((normal(5, 2),), {}),), "said"))
    half = half_of(subject)
    assert half.held_out[0][0][0].shape == (1, 4)
    assert half.objective is not None and half.objective.targets[0][0][0].shape == (2, 2)
    assert samples(half) == 2 and samples(subject) == 5


def test_one_sample_is_no_batch() -> None:
    assert halved(subject_of(nn.Linear(4, 2), normal(1, 4)), 0) is None


def test_samples_that_tell_on_each_other_stay_together() -> None:
    assert halved(subject_of(Mixed(), normal(4, 3)), 0) is None
    assert halved(subject_of(Counted(), normal(4, 3)), 0) is None


def test_the_model_comes_back_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model.train()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    subject = replace(subject_of(model, normal(4, 4)))
    model.train()
    assert half_of(subject).batches[0][0][0].shape == (2, 4)
    assert model.training and all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
