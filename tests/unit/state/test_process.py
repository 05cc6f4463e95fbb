"""The process is put back: every generator, dtype, thread count and gradient mode."""

from __future__ import annotations

import os
import random
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from auditor.state import unchanged
from auditor.state.process import settings, swapped, untouched


def state() -> tuple[Any, ...]:
    return (
        random.getstate(),
        [part.tolist() if isinstance(part, np.ndarray) else part for part in np.random.get_state()],
        torch.get_rng_state().tolist(),
        torch.get_default_dtype(),
        torch.get_num_threads(),
        torch.is_grad_enabled(),
    )


def disturb() -> None:
    random.random()
    np.random.rand()
    torch.rand(1)
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(torch.get_num_threads() + 1)
    torch.set_grad_enabled(False)


def disturb_and_raise() -> None:
    disturb()
    raise ValueError("inside")


def test_everything_comes_back() -> None:
    before = state()
    with untouched(3):
        disturb()
        assert state() != before
    assert state() == before


def test_everything_comes_back_after_an_error() -> None:
    before = state()
    with pytest.raises(ValueError, match="inside"), untouched(3):
        disturb_and_raise()
    assert state() == before


def test_the_seed_decides_what_is_drawn() -> None:
    def draw(seed: int) -> tuple[float, float, float]:
        with untouched(seed):
            return random.random(), float(np.random.rand()), float(torch.rand(1))

    assert draw(1) == draw(1)
    assert all(a != b for a, b in zip(draw(1), draw(2), strict=True))


class Base:
    value = 1


def test_what_is_swapped_comes_back_after_an_error() -> None:
    seen = []
    with pytest.raises(ValueError, match="inside"), swapped(Base, "value", 2):
        raise ValueError(seen.append(Base.value) or "inside")
    assert [*seen, Base.value] == [2, 1]


def test_what_a_class_inherits_is_not_swapped_in_it() -> None:
    class Heir(Base):
        pass

    with pytest.raises(KeyError), swapped(Heir, "value", 2):
        pass
    assert vars(Heir).get("value") is None


def test_the_environment_and_the_precision_of_products_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUDITOR_TEST_KEPT", "a")
    monkeypatch.setenv("AUDITOR_TEST_GONE", "b")
    before, precision = dict(os.environ), torch.get_float32_matmul_precision()
    with untouched(0):
        os.environ |= {"AUDITOR_TEST_KEPT": "c", "AUDITOR_TEST_ADDED": "d"}
        del os.environ["AUDITOR_TEST_GONE"]
        torch.set_float32_matmul_precision("medium")
    assert dict(os.environ) == before
    assert torch.get_float32_matmul_precision() == precision


SET: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
    "dtype": (torch.get_default_dtype, lambda: torch.set_default_dtype(torch.float64)),
    "threads": (torch.get_num_threads, lambda: torch.set_num_threads(torch.get_num_threads() + 1)),
    "gradients": (torch.is_grad_enabled, lambda: torch.set_grad_enabled(not torch.is_grad_enabled())),
    "products": (torch.get_float32_matmul_precision, lambda: torch.set_float32_matmul_precision("medium")),
    "algorithms": (
        torch.are_deterministic_algorithms_enabled,
        lambda: torch.use_deterministic_algorithms(True, warn_only=True),
    ),
    "autocast": (lambda: torch.is_autocast_enabled("cpu"), lambda: torch.set_autocast_enabled("cpu", True)),
    "dtype of autocast": (
        lambda: torch.get_autocast_dtype("cuda"),
        lambda: torch.set_autocast_dtype("cuda", torch.bfloat16),
    ),
    "attention": (torch.backends.cuda.flash_sdp_enabled, lambda: torch.backends.cuda.enable_flash_sdp(False)),
    "environment": (lambda: dict(os.environ), lambda: os.environ.update(AUDITOR_TEST_SET="1")),
    "directory": (Path.cwd, lambda: os.chdir("/")),
    "path": (lambda: list(sys.path), lambda: sys.path.insert(0, "/nowhere")),
    "warnings": (lambda: list(warnings.filters), lambda: warnings.simplefilter("error", append=True)),
}


@pytest.mark.parametrize("name", SET)
def test_what_a_forward_sets_for_the_whole_process_comes_back(name: str) -> None:
    read, put = SET[name]
    before = read()
    back = settings()
    try:
        with unchanged(nn.Identity()):
            put()
            assert read() != before
        assert read() == before
    finally:
        back()


def test_a_directory_that_is_gone_keeps_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    gone = tmp_path / "gone"
    gone.mkdir()
    os.chdir(gone)
    gone.rmdir()
    with unchanged(nn.Identity()):
        os.chdir(tmp_path)
    with unchanged(nn.Identity()):
        pass
    assert Path.cwd() == tmp_path
