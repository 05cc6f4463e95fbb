"""The loss and the targets of a TARGET, by every name that is documented."""

from __future__ import annotations

from pathlib import Path

import pytest

from auditor.errors import AuditorError
from auditor.training.objective import load_training

MODEL = """
import torch
from torch import nn
model = nn.Linear(3, 2)
X, Y = torch.ones(4, 3), torch.zeros(4, 2)
def mse(y, t): return ((y - t) ** 2).mean()
"""
INPUTS = "def get_inputs(): return X\n"
TARGETS = "def get_targets(): return Y\n"


def write(folder: Path, text: str) -> str:
    file = folder / "subject.py"
    file.write_text(MODEL + text)
    return str(file)


@pytest.mark.parametrize(
    ("text", "loss", "source"),
    [
        (INPUTS + TARGETS + "loss_fn = mse\n", None, "subject.py:loss_fn"),
        (INPUTS + TARGETS + "def get_loss(): return nn.MSELoss()\n", None, "subject.py:get_loss"),
        (INPUTS + "targets = Y\ncriterion = nn.MSELoss()\n", None, "subject.py:criterion"),
        (INPUTS + TARGETS, "mse", "--loss mse"),
        ("def get_inputs(): return X, Y\nloss_fn = mse\n", None, "subject.py:loss_fn"),
        (
            "def get_inputs(): return {'input': X, 't': Y}\ndef loss_fn(y, t): return mse(y, t)\n",
            None,
            "subject.py:loss_fn",
        ),
        (INPUTS + "def loss_fn(y, batch): return mse(y, batch[0][:, :2] * 0)\n", None, "subject.py:loss_fn"),
        (
            "def audit_spec(): return {'model': model, 'inputs': X, 'loss': mse, 'targets': Y}\n",
            None,
            "subject.py:audit_spec",
        ),
    ],
)
def test_every_way_to_say_it(tmp_path: Path, text: str, loss: str | None, source: str) -> None:
    subject = load_training(write(tmp_path, text), loss=loss)
    assert subject.objective is not None
    assert subject.objective.source == source
    assert subject.batches[0][0] == () or subject.batches[0][0][0].shape == (4, 3)


def test_a_loss_of_another_file(tmp_path: Path) -> None:
    (tmp_path / "losses.py").write_text("def l1(y, t): return (y - t).abs().mean()\n")
    subject = load_training(write(tmp_path, INPUTS + TARGETS), loss=f"{tmp_path}/losses.py:l1")
    assert subject.objective is not None
    assert subject.objective.loss_fn.__name__ == "l1"


def test_held_out_batches_lose_their_targets_too(tmp_path: Path) -> None:
    text = "def get_inputs(): return X, Y\ndef get_eval_inputs(): return [(X, Y), (X, Y)]\nloss_fn = mse\n"
    subject = load_training(write(tmp_path, text))
    assert [len(args) for args, _ in subject.held_out] == [1, 1]


@pytest.mark.parametrize(
    ("text", "loss", "slug"),
    [
        (INPUTS, None, "no-loss"),
        (INPUTS + TARGETS, "nothing", "missing-loss"),
        (INPUTS + TARGETS, "elsewhere.py:f", "missing-target"),
        (INPUTS + TARGETS + "loss_fn = 3\n", None, "missing-loss"),
        (INPUTS + TARGETS + "loss_fn = nn.MSELoss\n", None, "missing-loss"),
        (INPUTS + "loss_fn = mse\n", None, "bad-targets"),
        (INPUTS + "def get_targets(): return [(Y,), (Y,)]\nloss_fn = mse\n", None, "bad-targets"),
        (INPUTS + "def get_targets(): raise ValueError('x')\nloss_fn = mse\n", None, "inputs-raise"),
        (INPUTS + TARGETS + "def loss_fn(y, t): raise ValueError('no luck')\n", None, "bad-loss"),
        (INPUTS + TARGETS + "def get_loss(): raise ValueError('no luck')\n", None, "bad-loss"),
        (INPUTS + TARGETS + "model.requires_grad_(False)\nloss_fn = mse\n", None, "no-gradient"),
    ],
)
def test_what_is_wrong_has_a_name(tmp_path: Path, text: str, loss: str | None, slug: str) -> None:
    with pytest.raises(AuditorError) as caught:
        load_training(write(tmp_path, text), loss=loss)
    assert caught.value.slug == slug
    assert "\n" not in str(caught.value)
