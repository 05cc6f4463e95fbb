"""Runs of the graph under a choice: begun from one beside it, and made once for all who ask."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from auditor.cache.kept import Met
from auditor.formats.metrics import output_error
from auditor.plan import trial as module
from auditor.plan.trial import Trial
from auditor.records import Capture
from auditor.replay.running import Running
from auditor.replay.strategies import running
from auditor.runs.outputs import tensor_outputs
from tests.subjects import capture_of, normal, seeded


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return seeded(lambda: nn.Sequential(*(nn.Linear(16, 16) for _ in range(6))))


@pytest.fixture(scope="module")
def capture(model: nn.Module) -> Capture:
    return capture_of(model, normal(4, 16))


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many operations each run computed that began from another one, and of others all."""
    found: list[int] = []

    class Counted(module.PolicyAgain):
        def run(self, *args: Any, **kwargs: Any) -> Any:
            result = super().run(*args, **kwargs)
            found.append(sum(node.op == "call_function" for node in self.changed))
            return result

    class Whole(module.PolicyInterpreter):
        def run(self, *args: Any, **kwargs: Any) -> Any:
            found.append(len(self.capture.nodes))
            return super().run(*args, **kwargs)

    monkeypatch.setattr(module, "PolicyAgain", Counted)
    monkeypatch.setattr(module, "PolicyInterpreter", Whole)
    return found


def trial_of(model: nn.Module, capture: Capture, *inputs: torch.Tensor) -> Trial:
    batches = [((x,), {}) for x in inputs]
    with torch.no_grad():
        references = [tensor_outputs(model(x)) for x in inputs]
    return Trial(capture, model, batches, references, output_error, tuple(Met() for _ in inputs))


def keeping(capture: Capture, kept: Sequence[str]) -> Running:
    return running(capture, "cast", lambda path: "fp32" if path in kept else "bf16", "bf16")


def test_runs_beside_one_begin_from_it_and_come_to_the_same(model: nn.Module, capture: Capture, ran: list[int]) -> None:
    x = normal(4, 16)
    beside = trial_of(model, capture, x).near(keeping(capture, ()))
    for kept in ((), ("3",), ("5",), ("1", "3")):
        how = keeping(capture, kept)
        assert beside.error(how) == trial_of(model, capture, x).error(how)
    assert [count for count in ran if count != 6] == [0, 3, 1, 5]


def test_a_run_is_made_once_on_each_batch(model: nn.Module, capture: Capture, ran: list[int]) -> None:
    first, second = normal(4, 16), 2 * normal(4, 16)
    trial, how = trial_of(model, capture, first, second), keeping(capture, ("1",))
    assert not trial.knows(how)
    error = trial.error(how)
    assert trial.knows(how) and not trial.knows(keeping(capture, ("2",)))
    assert trial.error(how) == error == trial_of(model, capture, first, second).error(how)
    assert len(ran) == 4
    alone = Trial(capture, model, trial.batches[:1], trial.references[:1], output_error)
    alone.error(how)
    assert not alone.knows(how)  # where nothing is kept
