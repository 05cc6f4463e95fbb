"""On a GPU a copy is audited: the caller's model must not be moved there, not even a part of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from auditor.errors import AuditorError
from auditor.loading.placement import copied, placed
from tests.subjects import normal, subject_of


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
    monkeypatch.setattr(nn.Module, "cuda", lambda self: moved.append(self) or self)
    with pytest.raises(AuditorError, match="device='cpu'") as caught:
        placed(subject_of(model, normal(3, 4)), native=True)
    assert caught.value.slug == "no-copy"
    assert moved == []


def test_a_copy_is_the_same_model_of_other_tensors() -> None:
    model = nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2)).eval()
    twin = copied(model)
    assert torch.equal(twin(normal(3, 4)), model(normal(3, 4)))
    ours = {x.data_ptr() for x in (*model.parameters(), *model.buffers())}
    assert not ours & {x.data_ptr() for x in (*twin.parameters(), *twin.buffers())}
