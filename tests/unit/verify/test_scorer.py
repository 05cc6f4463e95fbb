"""The scoring process from the inside: the plan applied, the function called, the model as it was, without starting one."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from auditor.score import Given
from auditor.verify import FP32
from auditor.verify.scorer import score_plan
from auditor.verify.scores import COUNTED, counted

SOURCE = """
import torch, time

def weights(model):
    for _ in range(2):
        yield float(model(torch.ones(1, 2)).float())

def asleep(model):
    time.sleep(30)
"""


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    file = tmp_path / "inner_scores.py"
    file.write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    yield {
        "function": f"{file}:weights",
        "cwd": str(tmp_path),
        "scratch": str(tmp_path),
        "device": "cpu",
        "seed": 0,
        "most": None,
        "limit": 60.0,
    }
    for name in [name for name, module in sys.modules.items() if getattr(module, "__file__", None) == str(file)]:
        del sys.modules[name]


def doubling(model: nn.Linear, plan: str) -> None:
    if plan == "broken":
        raise ValueError("no such scope\nand more")
    model.weight.data = 2 * model.weight.data


PATCHED: Any = SimpleNamespace(apply=doubling, PLANS={"plan": {}, "broken": {}})


def model() -> nn.Linear:
    found = nn.Linear(2, 1, bias=False)
    nn.init.ones_(found.weight)
    return found


def test_the_plan_is_applied_for_as_long_as_the_function_runs(job: dict[str, Any]) -> None:
    net = model()
    assert score_plan(PATCHED, net, "plan", job, job) == Given((4.0, 4.0), False, 2)
    assert score_plan(PATCHED, net, FP32, job, job) == Given((2.0, 2.0), False, 2)
    assert net.weight.tolist() == [[1.0, 1.0]]
    assert (Path(job["scratch"]) / COUNTED).read_text() in (counted("plan", 1), counted(FP32, 1))


def test_what_goes_wrong_is_one_line(job: dict[str, Any]) -> None:
    assert score_plan(PATCHED, model(), "broken", job, job) == "ValueError: no such scope"
    gone = {**job, "function": job["function"].replace("weights", "gone")}
    assert "has no 'gone'" in str(score_plan(PATCHED, model(), FP32, gone, job))
    more = score_plan(PATCHED, model(), FP32, {**job, "most": 1}, job)
    assert more == "the function gave more numbers than in FP32, where it gave 1: they are no pairs"


def test_sleep_ends_when_its_time_is_up_and_the_timer_is_gone(job: dict[str, Any]) -> None:
    before, start = signal.getsignal(signal.SIGALRM), time.monotonic()
    asleep = {**job, "function": job["function"].replace("weights", "asleep"), "limit": 0.3}
    assert score_plan(PATCHED, model(), FP32, asleep, job) == "the function gave no score within 0.3 seconds"
    assert time.monotonic() - start < 10
    assert signal.getsignal(signal.SIGALRM) is before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
