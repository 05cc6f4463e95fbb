"""Batches of a loader in the user's file are the inputs of an audit in both modes, without their labels."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from auditor.features.training.objective import load_training
from auditor.loading import inputs, load

TOP = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
X, Y = torch.randn(12, 3), torch.randn(12, 2)
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(3, 2)
    def forward(self, x): return self.head(x)
loss_fn = nn.MSELoss()
"""
PAIRS = "train_loader = DataLoader(TensorDataset(X, Y), 2)\n"
OF_FOUR = "net.py:train_loader, the first 4 batches"


def write(folder: Path, text: str) -> str:
    (folder / "net.py").write_text(TOP + text)
    return f"{folder}/net.py:Net"


@pytest.mark.parametrize(
    ("text", "source"),
    [
        (PAIRS, OF_FOUR),
        (PAIRS.replace("train_loader", "val_loader"), "net.py:val_loader, the first 4 batches"),
        ("loader = [{'image': x, 'label': y} for x, y in zip(X.split(4), Y.split(4))]\n", "net.py:loader, the first 3"),
        ("loader = [{'x': x, 'y': y} for x, y in zip(X.split(4), Y.split(4))]\n", "net.py:loader, the first 3"),
        ("batches = (X, Y)\n", "net.py:batches, the only batch"),
        ("batches = {'x': X, 'target': Y}\n", "net.py:batches, the only batch"),
        ("def get_batches():\n    yield from zip(X.split(4), Y.split(4))\n", "net.py:get_batches, the first 3"),
        ("batches = 3\n" + PAIRS, OF_FOUR),
    ],
)
def test_batches_of_a_loader_serve_both_modes(tmp_path: Path, text: str, source: str) -> None:
    target = write(tmp_path, text)
    for subject in (load(target), load_training(target)):
        assert subject.inputs_source.startswith(source)
        assert not subject.synthetic_inputs
        sizes = {len(args) + len(kwargs) for args, kwargs in subject.batches}
        assert sizes == {1}
    assert len(load_training(target).objective.targets) == len(load(target).batches)
    assert any("taken for labels and left out" in note for note in load(target).warnings)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("batches = X.split(4)\n", 3),
        ("batches = X.split(6)\n", 2),
        ("batches = X.split(5)\n", 3),  # of 5, 5 and 2 rows
        ("batches = X.unsqueeze(1).unbind()\n", 4),  # the first of twelve
        ("batches = tuple(torch.randn(4, 3) for _ in range(4))\n", 4),
        ("def get_inputs(): return X.split(4)\n", 3),
        ("example_inputs = X.chunk(2)\n", 2),
        ("batches = X.split(4)\ntargets = Y.split(4)\n", 3),
    ],
)
def test_a_tuple_of_tensors_that_are_alike_is_a_series_of_batches(tmp_path: Path, text: str, count: int) -> None:
    subject = load(write(tmp_path, text))
    assert [len(args) for args, _ in subject.batches] == [1] * count
    assert not any("labels" in note for note in subject.warnings)
    if "targets" in text:
        assert len(load_training(write(tmp_path, text)).objective.targets) == count


@pytest.mark.parametrize(
    "text",
    [
        "batches = (X, Y)\n",
        "batches = (X, X.clone())\n",  # an input and a target that are alike
        "batches = (X, X)\n",
        "batches = (X, X + 1, X > 0)\n",
    ],
)
def test_an_input_with_its_labels_is_one_batch(tmp_path: Path, text: str) -> None:
    assert load(write(tmp_path, text)).inputs_source.endswith("the only batch")


def test_parts_of_one_tensor_are_arguments_of_a_forward_that_takes_them(tmp_path: Path) -> None:
    attention = "def score(self, q, k): return q @ k.T\nNet.forward = score\n"
    (batch,) = load(write(tmp_path, attention + "batches = X.chunk(2)\n")).batches
    assert len(batch[0]) == 2
    several = "def total(self, *xs): return sum(xs)\nNet.forward = total\n"
    (batch,) = load(write(tmp_path, several + "batches = X.split(4)\n")).batches
    assert len(batch[0]) == 3


@pytest.mark.parametrize("text", ["batches = X\n", "batches = [X, X]\n"])
def test_tensors_without_labels_are_batches(tmp_path: Path, text: str) -> None:
    subject = load(write(tmp_path, text))
    assert subject.inputs_source.startswith("net.py:batches")
    assert all(len(args) == 1 for args, _ in subject.batches)
    assert not any("labels" in note for note in subject.warnings)


def test_inputs_that_the_file_names_come_before_its_loader(tmp_path: Path) -> None:
    text = PAIRS + "def get_inputs(): return X\n"
    assert load(write(tmp_path, text)).inputs_source.endswith(":get_inputs")


def test_a_loader_of_other_batches_is_said_and_inputs_are_generated(tmp_path: Path) -> None:
    subject = load(write(tmp_path, "train_loader = [('a text', 1)]\n"))
    assert subject.synthetic_inputs
    assert any("train_loader, whose batches are not what forward takes" in note for note in subject.warnings)


class Detector(nn.Module):
    """Takes images, and nothing else."""

    def forward(self, images: Any) -> Any:
        return images[0].sum()


def test_lists_of_targets_and_further_entries_are_labels() -> None:
    images, rows = [torch.ones(3, 4), torch.ones(3, 5)], torch.ones(2, 3)
    boxes = [{"boxes": torch.ones(1, 4)}, {"boxes": torch.ones(3, 4)}]
    for args in ((images, boxes), (rows, boxes), (rows, torch.arange(2), torch.arange(2))):
        batches, notes = inputs.without_labels(Detector(), ((args, {}),))
        assert [len(kept) for kept, _ in batches] == [1]
        assert "taken for labels" in notes[0]


def test_the_only_named_entry_is_the_only_argument() -> None:
    batches, notes = inputs.without_labels(Detector(), (((), {"image": torch.ones(2, 3), "label": torch.ones(2)}),))
    assert [(len(args), kwargs) for args, kwargs in batches] == [(1, {})]
    assert notes[-1] == "`image` of each batch is passed as forward's only argument."
