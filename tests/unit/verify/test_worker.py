"""The verification process from the inside: what it imports, runs and writes, without starting one."""

import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from auditor.loading.importer import import_source
from auditor.records import TimeAndMemory, Times
from auditor.score import ScoreResult
from auditor.verify import FP32, Answers, Runs
from auditor.verify.artefact import _read, hand
from auditor.verify.loaders import patch_model
from auditor.verify.worker import build_model, write

BATCH = ((torch.ones(1, 2),), {})


@pytest.fixture(autouse=True)
def module_comes_back() -> Iterator[None]:
    before = sys.modules.get("patched_model")
    yield
    sys.modules.pop("patched_model", None)
    if before is not None:
        sys.modules["patched_model"] = before


def doubling(model: nn.Linear, plan: str) -> None:
    if plan == "broken":
        raise ValueError("no such scope\nand more")
    model.weight.data = 2 * model.weight.data
    model.forward = lambda x: nn.Linear.forward(model, x).half()


PATCHED: Any = SimpleNamespace(apply=doubling, PLANS={"plan": {}, "broken": {}})


def runs(module: Any, model: nn.Module) -> Runs:
    return Runs(partial(patch_model, model, module.PLANS, module.apply), [BATCH], gradients=True)


def test_the_answer_is_the_patched_models_and_the_model_is_as_before() -> None:
    model = nn.Linear(2, 1, bias=False)
    nn.init.ones_(model.weight)
    found = runs(PATCHED, model).answers("plan")
    assert isinstance(found, Answers)
    assert [[(x.tolist(), x.dtype) for x in batch] for batch in found.outputs] == [[([[4.0]], torch.float16)]]
    assert found.graded[0].tolist() == [[4.0]]
    assert model.weight.tolist() == [[1.0, 1.0]]
    assert "forward" not in vars(model)


def test_a_plan_that_cannot_be_applied_is_a_failure_in_one_line() -> None:
    model = nn.Linear(2, 1)
    assert runs(PATCHED, model).answers("broken") == "ValueError: no such scope"


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    write(tmp_path / "0.pt", Answers([[torch.ones(2)]], None))
    write(tmp_path / "1.pt", "it failed")
    write(
        tmp_path / "2.pt", TimeAndMemory(eager=Times(0.2, 0.1, 0.3, 9), memory=5, missing={"compiled": "no compiler"})
    )
    write(tmp_path / "3.pt", ScoreResult((1.0, 2.0), False, 2))
    assert {path.name for path in tmp_path.iterdir()} == {f"{index}.pt" for index in range(4)}  # nothing unfinished
    answer, failure, timed, given = (_read(tmp_path / f"{index}.pt") for index in range(4))
    assert answer.outputs[0][0].tolist() == [1.0, 1.0]
    assert failure == "it failed"
    assert timed == TimeAndMemory(eager=Times(0.2, 0.1, 0.3, 9), memory=5, missing={"compiled": "no compiler"})
    assert given == ScoreResult((1.0, 2.0), False, 2)


SOURCE = """
import contextlib, torch
SOURCE = "model.py"
calls = []
@contextlib.contextmanager
def user_module(source, file):
    calls.append((source, torch.rand(1).item()))
    yield
def original():
    calls.append(("original", torch.rand(1).item()))
    return torch.nn.Dropout()
"""


def test_the_model_is_made_with_the_random_numbers_of_the_audit(tmp_path: Path) -> None:
    file = tmp_path / "anywhere.py"
    file.write_text(SOURCE)
    with torch.random.fork_rng(devices=[]):
        patched = import_source("patched_model", file)
        model = build_model(patched, {"seed": 3, "device": "cpu"})
        torch.manual_seed(3)
        first = torch.rand(1).item()
    assert patched.calls == [("model.py", first), ("original", first)]  # both begin with the seed
    assert not model.training
    assert sys.modules[patched.__name__] is patched  # so that what is pickled there is found again


SCORES = """
import torch

def weights(model):
    for _ in range(2):
        yield float(model(torch.ones(1, 2)).float())
"""


@pytest.fixture
def function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    file = tmp_path / "inner_scores.py"
    file.write_text(SCORES)
    monkeypatch.chdir(tmp_path)
    yield f"{file}:weights"
    for name in [name for name, module in sys.modules.items() if getattr(module, "__file__", None) == str(file)]:
        del sys.modules[name]


def of_ones() -> nn.Linear:
    found = nn.Linear(2, 1, bias=False)
    nn.init.ones_(found.weight)
    return found


def test_the_plan_is_applied_for_as_long_as_the_function_runs(function: str) -> None:
    net = of_ones()
    assert runs(PATCHED, net).score("plan", function) == ScoreResult((4.0, 4.0), False, 2)
    assert runs(PATCHED, net).score(FP32, function) == ScoreResult((2.0, 2.0), False, 2)
    assert net.weight.tolist() == [[1.0, 1.0]]


def test_what_goes_wrong_is_one_line(function: str) -> None:
    asked = runs(PATCHED, of_ones())
    assert asked.score("broken", function) == "ValueError: no such scope"
    assert "has no 'gone'" in str(asked.score(FP32, function.replace("weights", "gone")))
    more = "the function returned more numbers than in FP32, where it returned 1: they cannot be paired"
    assert asked.score(FP32, function, most=1) == more


FOLLOWING = """
import sys, time
from auditor.verify.worker import jobs
handed = jobs()
next(handed)
print(repr(sys.stdin.read()), flush=True)
print(list(handed), flush=True)
time.sleep(60)
"""


def test_a_process_ends_with_whoever_holds_its_standard_input(tmp_path: Path, root: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    process: Any = subprocess.Popen(
        [sys.executable, "-c", FOLLOWING], cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    for job in ({"scratch": scratch}, "one", "tw\no", None):
        hand(process, job)
    assert process.stdout.readline() == b"''\n"  # its own standard input is empty
    assert process.stdout.readline() == b"['one', 'tw\\no']\n"
    assert scratch.exists()
    process.stdin.close()
    assert process.wait(timeout=60) == 1
    assert not scratch.exists()
