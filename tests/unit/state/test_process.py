"""The process is put back: every generator, dtype, thread count and gradient mode."""

from __future__ import annotations

import os
import random
from typing import Any

import numpy as np
import pytest
import torch

from auditor.state.process import swapped, untouched


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
