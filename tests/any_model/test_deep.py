"""Modules nested so deep that a model's own forward takes nearly all the calls that Python allows, or more than that."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import auditor
from auditor.errors import AuditorError
from tests.any_model.holding import Call, held
from tests.support.replaying import linear
from tests.support.subjects import normal, seeded

X = normal(4, 8)


class Around(nn.Module):
    """Calls what it holds."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.inner(x)
        return result


class Endless(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self(x)
        return result


def nested(kind: type[nn.Module], levels: int) -> tuple[nn.Module, Call]:
    model: nn.Module = linear(8, 8)
    for _ in range(levels):
        model = kind(model)
    return model.eval(), ((X.clone(),), {})


@contextmanager
def limited(calls: int) -> Iterator[None]:
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(calls)
    try:
        yield
        assert sys.getrecursionlimit() == calls
    finally:
        sys.setrecursionlimit(before)


@pytest.mark.parametrize("kind", [Around, nn.Sequential])
def test_modules_two_hundred_and_fifty_deep_in_each_other(kind: type[nn.Module]) -> None:
    with limited(1_200):  # four calls of Python a level where the test itself emulates a GPU, and what pytest has open
        held(lambda: nested(kind, 250))


def test_it_is_audited_where_only_the_audit_would_run_it() -> None:
    """Its owner's own call would end in a RecursionError: the audit's does not."""
    model, (args, _) = nested(Around, 250)
    with limited(600):
        with pytest.raises(RecursionError):
            model(*args)
        assert auditor.audit(model, args, device="cpu", formats=("bf16",)).plans["autocast_bf16"].verified


def test_endless_recursion_is_one_clear_line() -> None:
    with pytest.raises(AuditorError, match="RecursionError"):
        auditor.audit(Endless(), (X,), device="cpu")


class Layered(nn.Module):
    def __init__(self, kind: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.layers = kind(8, 8, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layers(x)[0]
        return result


@pytest.mark.parametrize("kind", [nn.LSTM])
def test_over_a_thousand_steps(kind: Callable[..., nn.Module]) -> None:
    held(lambda: (seeded(lambda: Layered(kind)).eval(), ((normal(2, 1_200, 8),), {})), formats=("fp16",))


SOURCE = """
import sys
import torch
from torch import nn

sys.setrecursionlimit(1_000)


class Around(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)


def get_model():
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    for _ in range(250):
        model = Around(model)
    return model


def get_inputs():
    return torch.randn(4, 8)
"""


@pytest.mark.slow
def test_the_limit_of_the_users_file_holds_in_the_verifying_process_too(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(SOURCE)
    command = [sys.executable, "-m", "auditor", "model.py", "--quiet", "--format", "json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stderr
    assert torch.tensor([line.count('"verified": true') for line in done.stdout.splitlines()]).sum() >= 4
