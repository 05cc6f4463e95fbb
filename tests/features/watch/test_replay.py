"""Planted failures are reproduced from their capsules, and the line to blame is named."""

import random
from pathlib import Path

import pytest
import torch

from tests.features.watch.planted import is_named, replayed
from tests.features.watch.plants import PLANTS, lines_of

QUICK = (
    "a_counter_in_a_buffer",
    "attention_scores_in_fp16",
    "bf16_weights_that_no_longer_change",
    "clipping_before_unscaling",
    "the_second_of_two_optimizers",
    "where_that_hides_a_division",
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
