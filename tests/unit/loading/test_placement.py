"""On a GPU a copy is audited: the caller's model must not be moved there, not even a part of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from auditor.errors import AuditorError
from auditor.loading.placement import copied, moved, place_subject
from auditor.training.objective import training_subject
from tests.support.subjects import normal, subject_of


class Whole(nn.Linear):
    """Copies of it are the model itself."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Whole:
        return self


class Part(nn.Linear):
    """Copies of it hold the weights of the original."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Part:
        twin = Part(self.in_features, self.out_features)
        twin.weight = self.weight
        return twin


class Refusing(nn.Linear):
    def __deepcopy__(self, memo: dict[int, Any]) -> Refusing:
        raise TypeError("cannot pickle '_thread.lock' object")


@pytest.mark.parametrize("model_class", [Whole, Part, Refusing])
@pytest.mark.parametrize("inside", [False, True])
def test_models_that_cannot_be_copied_are_refused_before_they_are_moved(
    model_class: type[nn.Linear], inside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Sequential(nn.ReLU(), model_class(4, 2)) if inside else model_class(4, 2)
    moved: list[nn.Module] = []
    monkeypatch.setattr(nn.Module, "to", lambda self, device: moved.append(self) or self)
    with pytest.raises(AuditorError, match="device='cpu'") as caught:
        place_subject(subject_of(model, normal(3, 4)), "meta")
    assert caught.value.slug == "no-copy"
    assert moved == []


def test_a_copy_is_the_same_model_of_other_tensors() -> None:
    model = nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2)).eval()
    twin = copied(model, "cpu")
    assert torch.equal(twin(normal(3, 4)), model(normal(3, 4)))
    ours = {x.data_ptr() for x in (*model.parameters(), *model.buffers())}
    assert not ours & {x.data_ptr() for x in (*twin.parameters(), *twin.buffers())}


def test_plain_tensors_and_what_a_loss_closes_over_are_moved_and_the_callers_are_not() -> None:
    class Held(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 2)
            self.shift, self.more = torch.ones(4), {"list": [torch.ones(2)], "pair": (torch.ones(2), "word")}

    model, weight = Held(), torch.ones(2)
    subject = training_subject(model, (normal(3, 4), normal(3, 2)), {}, lambda y, t: (weight * (y - t)).sum())
    twin = moved(subject, "meta")
    assert isinstance(twin.model, Held)
    inside = [twin.model.shift, twin.model.more["list"][0], twin.model.more["pair"][0], twin.model.weight]
    assert {x.device.type for x in inside} == {"meta"}
    ones = torch.ones(3, 2, device="meta")
    assert twin.objective.loss_fn(ones, ones).device.type == "meta"
    ours = [model.shift, model.more["list"][0], model.more["pair"][0], model.weight, weight]
    assert {x.device.type for x in ours} == {"cpu"}
