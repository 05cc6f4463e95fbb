"""Planted failures are reproduced from their capsules, and the line to blame is named."""

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import auditor
from auditor.features.watch import capsule as files
from auditor.features.watch.recorder import inert_recorders
from auditor.features.watch.replay import replay
from tests.features.watch.planted import is_named, replayed, train
from tests.features.watch.plants import PLANTS, classes, lines_of

QUICK = (
    "a_counter_in_a_buffer",
    "bf16_weights_that_no_longer_change",
    "clipping_before_unscaling",
)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in PLANTS]
)
def test_a_planted_failure_is_reproduced_and_named(name: str, tmp_path: Path) -> None:
    random.seed(0)
    _, result = replayed(name, tmp_path)
    about = result.about
    assert about.kind in PLANTS[name]().kinds
    assert result.is_reproduced, result.verdict
    assert is_named(result, lines_of(name)), (result.verdict, result.findings)


def test_a_replay_says_what_repairs_and_what_does_not(tmp_path: Path) -> None:
    _, result = replayed("attention_scores_in_fp16", tmp_path / "low")
    assert (result.recorded, result.fails_in_fp32) == ("as_written", False)
    assert result.outcome("fp32").problem == ""
    assert result.outcome("fp16_autocast").culprit is not None
    assert result.repair in ("fp16_autocast_island", "bf16_autocast")
    assert result.advice.startswith("Train in ")
    _, result = replayed("a_mask_without_entries", tmp_path / "fp32")
    assert (result.recorded, result.fails_in_fp32, result.repair) == ("fp32", True, "")
    assert "FP32 fails too" in result.advice


def test_bad_data_is_named_with_its_place(tmp_path: Path) -> None:
    torch.manual_seed(0)
    _, result = replayed("nan_labels", tmp_path)
    assert result.facts[0].startswith("Argument 1 has 1 entries of 16 that are NaN")
    assert result.advice.startswith("Repair the data: argument 1")


def test_the_recorded_draws_replace_the_cpus_own(tmp_path: Path) -> None:
    """As from a GPU, whose generators a CPU does not have: the step is recorded, and its generator's state is lost."""
    torch.manual_seed(0)
    name = "dropout_that_drops_all"
    capsule = files.read(train(PLANTS[name](), tmp_path, draws=True).capsules[0])
    torch.manual_seed(123)
    lost = {**capsule.calls[0].generators, "torch": torch.get_rng_state()}
    results = []
    for draws in (capsule.calls[0].draws, ()):
        call = replace(capsule.calls[0], generators=lost, draws=draws)
        path = files.write(replace(capsule, calls=(call,)), tmp_path, "lost")
        again = PLANTS[name]()
        with inert_recorders() as made:
            auditor.watch(again.model, again.optimizer)
        results.append(replay(path, again.step, name, made))
    assert [one.is_reproduced for one in results] == [True, False]
    assert is_named(results[0], lines_of(name))


class WithLoss(nn.Module):
    """A model that returns its loss, as those of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        scaled = x / x.abs().amax(-1, keepdim=True)  # the culprit
        return {"loss": F.cross_entropy(self.inner(scaled), labels)}


def test_hooks_alone_and_a_closure(tmp_path: Path) -> None:
    """The optimizer calls a closure, as Lightning's does: gradients appear inside `step`."""
    torch.manual_seed(0)
    model = WithLoss()
    optimizer = torch.optim.Adam(model.parameters())
    recorder = auditor.watch(model, optimizer, folder=tmp_path)
    for i in range(12):
        x, y = classes(i)
        x = x * (i != 9)

        def closure(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(x, labels=y)["loss"]
            loss.backward()
            return loss

        optimizer.step(closure)
    recorder.close()
    (path,) = recorder.capsules
    capsule = files.read(path)
    assert (capsule.about.step, capsule.about.kind) == (9, "loss-not-finite")
    assert all(bool(x.isfinite().all()) for x in capsule.weights.values())
    result = replay(path, WithLoss(), "model")
    assert result.is_reproduced
    assert result.culprit is not None
    assert result.culprit.cause == "division by zero"
