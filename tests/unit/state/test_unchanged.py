"""Whatever a model does to itself when it runs, it comes back: values to the bit, and the very same objects."""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from auditor.errors import AuditorError
from auditor.state import storages, unchanged
from tests.portrait import portrait, values
from tests.writers import NAMES, Writer, X, nothing, writer


@pytest.fixture(params=["at once", "before a write"])
def copied(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Small tensors are copied at once; without a budget all of them are treated as large ones."""
    if request.param == "before a write":
        monkeypatch.setattr(storages, "AT_ONCE", dict.fromkeys(storages.Role, 0))
    return request.param


def run(model: Any) -> None:
    model(X)


def run_and_raise(model: Any, error: BaseException) -> None:
    run(model)
    raise error


@pytest.mark.parametrize("name", NAMES)
def test_a_run_leaves_no_trace(name: str, copied: str) -> None:
    model = writer(name)
    before = portrait(model)
    with unchanged(model):
        run(model)
        assert portrait(model) != before
    assert portrait(model) == before


@pytest.mark.parametrize("name", NAMES)
def test_a_second_run_starts_like_the_first(name: str, copied: str) -> None:
    model = writer(name)
    seen = []
    for _ in range(2):
        with unchanged(model):
            run(model)
            seen.append(values(model))
    assert seen[0] == seen[1]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, GeneratorExit])
def test_it_comes_back_after_an_error(error: type[BaseException], copied: str) -> None:
    model = writer("buffers")
    before = portrait(model)
    with pytest.raises(error, match="inside"), unchanged(model):
        run_and_raise(model, error("inside"))
    assert portrait(model) == before


@dataclass(frozen=True)
class Frozen:
    tensor: torch.Tensor
    rest: dict[str, Any]


def test_inputs_come_back(copied: str) -> None:
    whole = torch.arange(6.0)
    batch = ((whole[:3], [torch.ones(2)]), {"mask": Frozen(whole[2:], {"more": torch.zeros(2)})})
    before = portrait(batch)
    with unchanged(nn.Identity(), batch):
        batch[0][0].add_(1)
        batch[0][1].append(batch[0][1][0].mul_(2))
        batch[1]["mask"].rest["more"] = batch[1]["mask"].tensor.zero_()
        batch[1].clear()
    assert portrait(batch) == before


def test_several_holders_come_back(copied: str) -> None:
    holders = [torch.ones(2)], {"a": torch.zeros(1)}
    before = portrait(holders)
    with unchanged(nn.Identity(), *holders):
        holders[0][0].add_(1)
        holders[1]["a"] = torch.ones(1)
    assert portrait(holders) == before


def test_every_body_draws_the_same() -> None:
    def draw() -> tuple[float, float, float]:
        with unchanged(nn.Identity()):
            return random.random(), float(np.random.rand()), float(torch.rand(1))

    assert draw() == draw()


def test_bodies_nest(copied: str) -> None:
    model = writer("batch norm")
    start = portrait(model)
    with unchanged(model):
        run(model)
        middle = portrait(model)
        with unchanged(model):
            run(model)
            model.linear.weight.data.zero_()
            assert portrait(model) != middle
        assert portrait(model) == middle
    assert portrait(model) == start


def test_a_write_inside_the_inner_body_alone_is_the_outer_one_s_too(copied: str) -> None:
    model = writer("item")
    start = portrait(model)
    with unchanged(model):
        with unchanged(nn.Identity()):
            run(model)
        assert portrait(model) != start
    assert portrait(model) == start


def test_views_stay_views(copied: str) -> None:
    """After a first run that made the view a result, writes into it must still reach the gradient of its base."""
    model = writer("hidden state")
    with unchanged(model):
        run(model)
    model.view.mul_(model.linear(X)[0, :2])
    assert model.base.requires_grad


@pytest.mark.filterwarnings("error")
def test_results_of_a_graph_come_back(copied: str) -> None:
    """They have no gradient to ask for: torch would warn."""
    model = Writer(nothing, lambda m, x: m.state.detach().zero_())
    model.state = model.linear(X)
    before = model.state.tolist()
    with unchanged(model):
        run(model)
        assert model.state.tolist() != before
    assert model.state.tolist() == before
    assert model.state.grad_fn is not None


class Recorder:
    """A hook with a store of its own."""

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []

    def __call__(self, module: nn.Module, args: Any, out: torch.Tensor) -> None:
        self.seen.append(out)


def test_what_hooks_record_is_undone() -> None:
    model, recorder = nn.Linear(3, 3), Recorder()
    model.register_forward_hook(recorder)
    with unchanged(model):
        model(X)
        assert len(recorder.seen) == 1
    assert recorder.seen == []


def test_what_a_hook_of_the_body_records_stays() -> None:
    model, recorder = nn.Linear(3, 3), Recorder()
    with unchanged(model):
        model.register_forward_hook(recorder)
        model(X)
    assert len(recorder.seen) == 1


def build_services(m: Any) -> None:
    m.lock, m.log, m.function = threading.Lock(), logging.getLogger("writer"), nothing


def test_the_standard_library_s_objects_are_left_alone() -> None:
    def use(m: Any, x: torch.Tensor) -> None:
        m.lock.acquire()
        m.log.setLevel(7)

    model = Writer(build_services, use)
    with unchanged(model):
        run(model)
    assert model.lock.locked()
    assert model.log.level == 7


def test_what_cannot_come_back_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storages, "AT_ONCE", dict.fromkeys(storages.Role, 0))
    model = Writer(nothing, lambda m, x: m.seen.untyped_storage().resize_(0))
    with pytest.raises(AuditorError, match="12 bytes") as caught, unchanged(model):
        run(model)
    assert caught.value.slug == "state-not-restored"


def test_one_that_cannot_come_back_does_not_keep_the_others() -> None:
    def close(m: Any, x: torch.Tensor) -> None:
        m.numbers.flags.writeable = False
        m.seen.add_(1)
        m.late = 1

    model = Writer(lambda m: setattr(m, "numbers", np.arange(3.0)), close)
    with pytest.raises(AuditorError, match="read-only"), unchanged(model):
        run(model)
    assert not hasattr(model, "late")
    assert model.seen.tolist() == [0, 0, 0]


def test_what_cannot_come_back_is_a_note_on_the_body_s_own_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storages, "AT_ONCE", dict.fromkeys(storages.Role, 0))
    model = Writer(nothing, lambda m, x: m.seen.untyped_storage().resize_(0))
    with pytest.raises(KeyError) as caught, unchanged(model):
        run_and_raise(model, KeyError("body"))
    assert "12 bytes" in caught.value.__notes__[0]


def test_torchscript_s_attributes_come_back(copied: str) -> None:
    model = torch.jit.script(Scripted())
    with unchanged(model):
        model(X)
        assert model.count == 1
    assert model.count == 0
    assert model.state.tolist() == model.seen.tolist() == [0, 0]
    assert [t.tolist() for t in model.held] == [[1]]


class Scripted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.state, self.held = torch.zeros(2), [torch.ones(1)]
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        self.state = self.state + 1
        self.seen += 1
        self.held[0].add_(1)
        self.held.append(x)
        return x
