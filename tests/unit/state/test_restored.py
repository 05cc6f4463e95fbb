"""Whatever a body does to a model, the same objects, storages and bits come back."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from auditor.state.restored import restored
from auditor.state.storages import AT_ONCE, Role
from tests.patching import identity, shared
from tests.subjects import normal, seeded


def write_statistics(model: nn.Module) -> None:
    model.train()
    model[1](normal(8, 4))


def convert_everything(model: nn.Module) -> None:
    model.half()


def register_more(model: nn.Module) -> None:
    model.register_buffer("more", torch.ones(2))
    model.register_forward_hook(lambda *_: None)
    model[0].weight = nn.Parameter(torch.zeros(4, 4))
    del model[1]


@pytest.mark.parametrize("body", [write_statistics, convert_everything, register_more])
def test_what_a_body_may_do(body: Callable[[nn.Module], None]) -> None:
    model = seeded(lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.GRU(4, 4)))
    model[0](normal(2, 4)).sum().backward()
    before = identity(model)
    with restored(model):
        body(model)
        assert identity(model) != before
    assert identity(model) == before


def test_buffers_are_tied_in_the_body_as_they_are() -> None:
    model = shared()
    with restored(model):
        assert model.norm.shift is model.shift
        model.front.zero_()
        assert model.back.tolist() == [0.0, 0.0, 4.0, 5.0]
    assert model.back.tolist() == [2.0, 3.0, 4.0, 5.0]


def test_a_buffer_on_a_parameter_s_memory_stays_there() -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("rows", model.weight.data[:1])
    model.plain = model.rows.view(-1)
    before = model.weight.detach().clone()
    with restored(model):
        model.rows.fill_(3)
        assert model.weight[0].tolist() == model.plain.tolist() == [3, 3]
    assert torch.equal(model.weight, before)
    assert model.rows.data_ptr() == model.weight.data_ptr() == model.plain.data_ptr()


def test_large_buffers_are_copied_when_they_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(AT_ONCE, Role.BUFFER, 0)
    model = nn.BatchNorm1d(4)
    with restored(model):
        model.running_mean += 1
    assert model.running_mean.tolist() == [0, 0, 0, 0]
