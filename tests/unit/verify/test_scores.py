"""The user's function in a process of its own: where it fails or prints, that is a line, and the next plan has its turn."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import nn

import auditor
from auditor.artefact.emit import emit
from auditor.records import Origin, Plan, ScopeChoice
from auditor.score import ScoreResult, find_function
from auditor.verify import FP32, Verifier

SOURCE = """
import os, sys, time
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, x):
        return self.lin(x)

def get_model():
    torch.manual_seed(0)
    return Net()

X = torch.linspace(-1, 1, 12).reshape(3, 4)

def means(model):
    print("on standard output")
    assert isinstance(model, Net), "the class of the model's own file"
    for x in X:
        yield model(x).float().mean() + float(open("number.txt").read())

def by_dtype(model):
    dtype = model(X).dtype
    if dtype is torch.float16:
        raise ValueError("in half")
    return 1.0

"""
LAYERS = 4 * 4 + 4


def test_a_fresh_process_gives_what_a_run_by_hand_does_and_raising_costs_the_plan_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    source, file = tmp_path / "scored_net.py", tmp_path / "patched_model.py"
    source.write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "number.txt").write_text("1")  # a path in the function counts from the user's directory
    names = (FP32, "autocast_fp16", "autocast_bf16")
    plans = {name: Plan("", "autocast", name[-4:], {"": ScopeChoice(name[-4:])}, 0.0, 1.0, 1.0) for name in names[1:]}
    file.write_text(emit(Origin(str(source), None, "get_model", "factory"), LAYERS, plans, None, tmp_path))
    (tmp_path / "scratch").mkdir()
    told: list[str] = []
    with Verifier([((torch.ones(1, 4),), {})], tmp_path / "scratch") as verifier:
        raised = verifier.scores(file, names[1:] + names[:1], find_function(f"{source}:by_dtype"))
        found = verifier.scores(file, names, find_function(f"{source}:means"), told=told.append)
    assert str(raised["autocast_fp16"]).startswith("the function raised ValueError: in half (scored_net.py:")
    assert raised["autocast_bf16"] == raised[FP32] == ScoreResult((1.0,), True, 1)
    torch.manual_seed(0)
    net, x = nn.Linear(4, 4), torch.linspace(-1, 1, 12).reshape(3, 4)
    with torch.no_grad():
        assert found[FP32] == ScoreResult(tuple((net(row).mean() + 1).item() for row in x), False, 3)
        for name, dtype in (("autocast_fp16", torch.float16), ("autocast_bf16", torch.bfloat16)):
            with auditor.emulate("cuda"), torch.autocast("cuda", dtype):
                assert found[name] == ScoreResult(tuple((net(row).float().mean() + 1).item() for row in x), False, 3)
    assert capfd.readouterr().out == ""
    assert Path.cwd() == Path(os.path.realpath(tmp_path))
    assert set(told) <= {"", *(f"{n}: {i}" for n in ("fp32", "autocast fp16", "autocast bf16") for i in (1, 2, 3))}
