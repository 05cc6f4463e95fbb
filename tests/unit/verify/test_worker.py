"""The verification process from the inside: what it imports, runs and writes, without starting one."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from auditor.verify.running import Answers
from auditor.verify.worker import built, import_file, run_plan, write

SETTINGS: dict[str, Any] = {"device": "cpu", "seed": 0, "gradients": True, "most": None}
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
    model.forward = lambda x: nn.Linear.forward(model, x).half()  # type: ignore[method-assign]


PATCHED: Any = SimpleNamespace(apply=doubling)


def test_the_answer_is_the_patched_models_and_the_model_is_as_before() -> None:
    model = nn.Linear(2, 1, bias=False)
    nn.init.ones_(model.weight)
    found = run_plan(PATCHED, model, "plan", [BATCH], SETTINGS)
    assert isinstance(found, Answers)
    assert [[(x.tolist(), x.dtype) for x in batch] for batch in found.outputs] == [[([[4.0]], torch.float16)]]
    assert found.graded is not None
    assert found.graded[0].tolist() == [[4.0]]
    assert model.weight.tolist() == [[1.0, 1.0]]
    assert "forward" not in vars(model)


def test_a_plan_that_cannot_be_applied_is_a_failure_in_one_line() -> None:
    model = nn.Linear(2, 1)
    assert run_plan(PATCHED, model, "broken", [BATCH], SETTINGS) == "ValueError: no such scope"


def test_a_model_that_cannot_run_is_a_failure_in_one_line() -> None:
    class Refusing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise RuntimeError("not today")

    assert run_plan(SimpleNamespace(apply=lambda model, plan: None), Refusing(), "plan", [BATCH], SETTINGS) == (  # type: ignore[arg-type]
        "RuntimeError: not today (test_worker.py:61)"
    )


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    write(tmp_path, 0, Answers([[torch.ones(2)]], None))
    write(tmp_path, 1, "it failed")
    assert {path.name for path in tmp_path.iterdir()} == {"0.pt", "1.pt"}  # nothing unfinished
    answer, failure = (torch.load(tmp_path / f"{index}.pt") for index in (0, 1))
    assert Answers(**answer).outputs[0][0].tolist() == [1.0, 1.0]
    assert failure == {"failure": "it failed"}


LOWERING = """
import torch
def apply(model, plan):
    if plan == "refused":
        raise ValueError(plan)
    run = model.forward
    def forward(x):
        with torch.autocast("cuda", torch.float16):
            return run(x)
    model.forward = forward
"""


SOURCE = """
import contextlib, torch
SOURCE = "model.py"
calls = []
@contextlib.contextmanager
def imported(source, file):
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
        patched = import_file(str(file))
        model = built(patched, {"seed": 3, "device": "cpu"})
        torch.manual_seed(3)
        first = torch.rand(1).item()
    assert patched.calls == [("model.py", first), ("original", first)]  # both begin with the seed
    assert not model.training


def test_the_file_is_known_by_one_name(tmp_path: Path) -> None:
    file = tmp_path / "anywhere.py"
    file.write_text("class Mine: pass\n")
    found = import_file(str(file))
    assert sys.modules["patched_model"] is found
    assert found.Mine.__module__ == "patched_model"  # so that what is pickled there is found again
