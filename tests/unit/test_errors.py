"""Errors the user meets: a slug each, the first line of what others say, and whether that is about what ran."""

from __future__ import annotations

import pickle
from collections.abc import Callable

import pytest
import torch

from auditor import errors
from auditor.errors import device_failed, device_is_full, from_outside, let_through, out_of_memory, time_is_up
from auditor.numerics.kernels import UnsupportedInFormat


@pytest.mark.parametrize(
    ("error", "expected"),
    [(ValueError("\n first \nsecond"), "first "), (KeyError(), "KeyError"), (RuntimeError("  "), "RuntimeError")],
)
def test_the_first_line_of_an_error(error: Exception, expected: str) -> None:
    assert errors.first_line(error) == expected


def test_errors_go_from_one_process_to_another() -> None:
    for error in (errors.AuditorError("no", "bad-option"), UnsupportedInFormat("no kernel", "layer")):
        copied = pickle.loads(pickle.dumps(error))
        assert (type(copied), str(copied), vars(copied)) == (type(error), str(error), vars(error))


FULL = RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: you tried")


@pytest.mark.parametrize("error", [MemoryError(), torch.OutOfMemoryError("full"), FULL])
def test_want_of_memory_is_let_through_unless_that_is_the_answer(error: Exception) -> None:
    assert out_of_memory(error)
    with pytest.raises(type(error)):
        let_through(error)
    let_through(error, memory=False)


def test_a_gpu_that_failed_is_let_through_unless_that_is_the_answer() -> None:
    error = torch.AcceleratorError("CUDA error: device-side assert triggered")
    wrapped = RuntimeError("a library's own words")
    wrapped.__cause__ = error
    for one in (error, wrapped):
        assert device_failed(one) and not device_is_full(one)
        with pytest.raises(type(one)):
            let_through(one)
        let_through(one, memory=False)
    full = torch.AcceleratorError("CUDA error: out of memory")
    assert device_is_full(full) and not device_failed(full)


@pytest.mark.parametrize("error", [RuntimeError("no memory format"), ValueError("DefaultCPUAllocator"), KeyError("x")])
def test_other_errors_are_about_what_ran(error: Exception) -> None:
    assert not out_of_memory(error)
    assert not time_is_up(error)
    let_through(error)


def test_a_time_limit_stays_one_when_a_library_wraps_it() -> None:
    wrapped = RuntimeError("failed")
    wrapped.__cause__ = TimeoutError("60 s")
    assert time_is_up(wrapped)
    assert time_is_up(TimeoutError())


def test_who_raised_it() -> None:
    def caught(call: Callable[[], object]) -> Exception:
        try:
            call()
        except Exception as error:
            return error
        raise AssertionError

    assert from_outside(caught(lambda: torch.ops.aten.mm(torch.ones(2), torch.ones(2))))
    assert not from_outside(caught(lambda: let_through(TimeoutError())))
    assert not from_outside(ValueError())
