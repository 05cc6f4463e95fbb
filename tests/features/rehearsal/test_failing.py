"""Steps that cannot be rehearsed and recipes that fail, each in one line; and the command, which says so too."""

import itertools
import json
import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import auditor
from auditor.cli import main
from auditor.errors import AuditorError
from auditor.features.rehearsal.page import overview
from auditor.report.blocks import Grid
from tests.features.rehearsal.cases import Made, classes, mlp, plain
from tests.support.refusing import refused


def _no_optimizer() -> Made:
    model = mlp(16, 4)
    return lambda x, y: F.cross_entropy(model(x), y).backward(), classes(1)


def _makes_its_own() -> Made:
    model = mlp(16, 4)
    return lambda x, y: plain(model, torch.optim.SGD(model.parameters(), lr=0.1))(x, y), classes(1)


def _raises() -> Made:
    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        raise ValueError("no such thing")

    return step, classes(1)


def _explodes() -> Made:
    model = mlp(16, 4)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    return plain(model, sgd, lambda out, y: F.cross_entropy(out, y) * float("inf")), classes(1)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (_no_optimizer, "the first 32 steps call no optimizer's step"),
        (_makes_its_own, "creates its own SGD"),
        (_raises, "the step raised ValueError: no such thing"),
        (lambda: (_no_optimizer()[0], []), "batches is empty"),
        (_explodes, r"gradients or weights turn Inf or NaN in step 0 \(batch 0\)"),
    ],
)
def test_a_step_that_cannot_be_rehearsed_is_refused_in_one_line(make: Any, said: str) -> None:
    with refused(AuditorError, "bad-step", match=said):
        auditor.rehearse(*make(), 3)


def test_a_recipe_that_raises_or_is_killed_fails_alone_with_the_losses_until_then() -> None:
    model = mlp(16, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inner = plain(model, optimizer)

    def step(x: torch.Tensor, y: torch.Tensor, ends: bool) -> float:
        if ends and model[0].weight.dtype is torch.bfloat16:
            os.kill(os.getpid(), signal.SIGKILL)
        if ends and torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") is torch.float16:
            raise ValueError("no such thing")
        loss = inner(x, y)
        with suppress(TypeError):  # which is no failure of the recipe
            optimizer.step(1)  # type: ignore[call-overload]
        return loss

    batches = [(*one, i == 2) for i, one in enumerate(classes(3))]
    found, until = auditor.rehearse(step, batches, 4), auditor.rehearse(step, batches, 2, remedies=False)
    assert {name: len(run.losses) for name, run in found.runs.items()} == {
        "fp32": 4,
        "bf16_autocast": 4,
        "fp16_autocast": 2,
        "bf16": 2,  # and no remedy is tried
    }
    assert {name for name, run in found.runs.items() if run.failure is None} == {"fp32", "bf16_autocast"}
    assert all(found.runs[name].losses == until.runs[name].losses for name in ("fp16_autocast", "bf16"))
    assert f"was killed by SIGKILL (at: step 1, loss {found.runs['bf16'].losses[1]})" in str(found.runs["bf16"].failure)
    assert "in step 2 (batch 2), the step raised ValueError: no such" in str(found.runs["fp16_autocast"].failure)
    assert {(each.recipe, each.kind) for each in found.problems} == {("bf16", "fails"), ("fp16_autocast", "fails")}
    rows = next(block for block in overview(found) if isinstance(block, Grid)).rows
    assert rows[2][1:] == (f"{found.runs['fp16_autocast'].losses[1]:.4g}", *[""] * 5, "failed in step 2")


@pytest.mark.parametrize("what", ["step", "batches"])
def test_what_raises_in_fp32_is_refused_with_the_step_at_which_it_does(what: str) -> None:
    model = mlp(16, 4)
    inner, calls = plain(model, torch.optim.SGD(model.parameters(), lr=0.1)), itertools.count()

    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        if what == "step" and next(calls) == 3:
            raise ValueError("no such thing")
        return inner(x, y)

    def batches() -> Any:
        yield from classes(2)
        if what == "batches":
            raise ValueError("no such thing")

    said = {"step": r"in step 3 \(batch 1\), the step raised", "batches": "before step 2, the batches raised"}[what]
    with refused(AuditorError, "bad-step", match=f"^the step fails in FP32: {said} ValueError: no such thing"):
        auditor.rehearse(step, batches, 5)


TRAIN = """
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Linear(8, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def get_batches():
    return [torch.randn(4, 8) for _ in range(3)]
def step(x):
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    print("in the step")
    return loss
def fails(x):
    return 1 / 0
"""


def test_the_command_writes_its_files_and_refuses_in_one_line(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    monkeypatch.chdir(tmp_path)
    assert main(["rehearse", "train.py:step", "--steps", "5", "--quiet"]) == 0
    said = capsys.readouterr()
    assert "Train in BF16 under autocast, without further changes" in said.out
    assert "in the step" not in said.out
    data = json.loads(Path("audits/train-step-rehearsal/rehearsal.json").read_text())
    assert (data["steps"], data["batches"], len(data["runs"]["fp32"]["losses"])) == (5, 3, 5)
    page = Path("audits/train-step-rehearsal/rehearsal.html").read_text()
    assert page.count('<path class="line') >= 6
    assert all(f'<path class="line {style}"' in page for style in ("plan", "bf16", "fp16", "bf16 cast"))
    assert "http" not in page.replace("http-equiv", "").replace("http://www.w3.org", "")
    assert main(["rehearse", "train.py:fails", "--steps", "5", "--out", "other", "--quiet"]) == 2
    assert "ZeroDivisionError: division by zero (train.py:17)" in capsys.readouterr().err
    assert not Path("other").exists()
