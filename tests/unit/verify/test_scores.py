"""The user's function in a process of its own: where it fails or prints, that is a line, and the next plan has its turn."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import auditor
from auditor.artefact.emit import emit
from auditor.records import Origin, Plan, ScopeChoice
from auditor.score import ScoreResult
from auditor.score import in_hand as in_hand_function
from auditor.verify import FP32, Runs, Verifier, in_hand

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


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, ScoreResult | str]]:
    """What a function of the model's file gives under plans."""
    source = tmp_path / "scored_net.py"
    source.write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    plans = {
        f"autocast_{fmt}": Plan("", "autocast", fmt, {"": ScopeChoice(fmt)}, 0.0, 1.0, 1.0) for fmt in ("fp16", "bf16")
    }
    file = tmp_path / "patched_model.py"
    file.write_text(emit(Origin(str(source), None, "get_model", "factory"), LAYERS, plans, None, tmp_path))

    def given(name: str, *names: str, **how: Any) -> dict[str, ScoreResult | str]:
        scratch = tmp_path / f"scratch_{name}"
        scratch.mkdir()
        with Verifier([((torch.ones(1, 4),), {})], scratch) as verifier:
            return verifier.ask(file, names, partial(Runs.score, scoring=f"{source}:{name}"), **how)

    return given


def test_a_fresh_process_gives_what_a_run_by_hand_does(
    run: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    told: list[str] = []
    (tmp_path / "number.txt").write_text("1")  # a path in the function counts from the user's directory
    found = run("means", FP32, "autocast_fp16", "autocast_bf16", told=told.append)
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


def test_raising_costs_the_plan_and_nothing_else(run: Any) -> None:
    found = run("by_dtype", "autocast_fp16", "autocast_bf16", FP32)
    assert found["autocast_fp16"].startswith("the function raised ValueError: in half (scored_net.py:")
    assert found["autocast_bf16"] == found[FP32] == ScoreResult((1.0,), True, 1)


def test_a_model_in_hand_is_scored_here_and_comes_back() -> None:
    torch.manual_seed(0)
    net, x = nn.Linear(4, 4), torch.ones(2, 4)
    plans = {"cast_bf16": Plan("cast_bf16", "cast", "bf16", {"": ScopeChoice("bf16")}, 0.0, 1.0, 1.0)}
    told: list[str] = []
    scoring = in_hand_function(lambda model: (float(model(row).float().sum()) for row in x))
    found = Runs(partial(in_hand, net, plans), told=told.append).score("cast_bf16", scoring)
    with torch.no_grad():
        low = nn.Linear(4, 4)
        low.load_state_dict(net.state_dict())
        low.bfloat16()
        with auditor.emulate("cuda"):
            expected = tuple(float(low(row.bfloat16()).float().sum()) for row in x)
    assert found == ScoreResult(expected, False, 2)
    assert told == ["cast bf16: 1", "cast bf16: 2"]
    assert net.weight.dtype is torch.float32
    assert "forward" not in vars(net)
