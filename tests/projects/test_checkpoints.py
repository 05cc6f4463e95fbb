"""Checkpoints as training loops leave them, given by `--weights`: the audit and the emitted file read them alike."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.projects.project import RANDOM, Case, audit_project, check_error, check_refused, check_verdict, state

SCALED = RANDOM.replace("nn.Linear(16", "Scaled(16").replace(
    "class Net",
    """class Scaled(nn.Linear):
    gain = 0.0

    def get_extra_state(self):
        return {"gain": self.gain}

    def set_extra_state(self, state):
        self.gain = state["gain"]

    def forward(self, x):
        return self.gain * super().forward(x)

class Net""",
)
ZEROS = {name: torch.zeros_like(value) for name, value in state().items()}
PREFIXED = {f"module.{name}": value for name, value in state().items()}
ARGUMENTS = argparse.Namespace(lr=0.1, out=Path("runs"))


class Mine:
    """A class of a project's own."""


READ = {
    "arguments beside": (RANDOM, {"model": state(), "args": ARGUMENTS}),
    "net, a prefix and one key without it": (RANDOM, {"net": {"n_averaged": torch.tensor(3), **PREFIXED}, "acc": 0.9}),
    "params, averaged": (RANDOM, {"params": ZEROS, "params_ema": state()}),
    "generator, with extra state": (
        SCALED,
        {"generator": {**state(), "up._extra_state": {"gain": 1.0}}, "disc": ZEROS},
    ),
}
REFUSED = {
    "a class of the user's": ({"model": state(), "config": Mine()}, ("net.pt", "Mine", "save plain tensors")),
    "TorchScript": (torch.jit.script(nn.Linear(16, 4)), ("net.pt", "TorchScript", "state_dict()")),
}


def case_of(text: str, content: Any) -> Case:
    def save(root: Path) -> None:
        (torch.jit.save if isinstance(content, torch.jit.ScriptModule) else torch.save)(content, root / "net.pt")

    return Case({"net/model.py": text}, "net/model.py:build", options=("--weights", "net.pt"), prepare=save)


@pytest.mark.parametrize("name", READ)
def test_checkpoints_that_are_read(name: str, tmp_path: Path) -> None:
    audited = audit_project(tmp_path / "project", case_of(*READ[name]))
    check_verdict(audited)
    assert ("n_averaged" in audited.done.stderr) == ("one key" in name)
    check_error(audited)


@pytest.mark.parametrize("name", REFUSED)
def test_checkpoints_that_are_refused_by_name(name: str, tmp_path: Path) -> None:
    content, words = REFUSED[name]
    audited = audit_project(tmp_path / "project", case_of(RANDOM, content))
    check_refused(audited.done, *words)
    assert audited.files == []
