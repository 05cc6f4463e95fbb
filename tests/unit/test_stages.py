"""What the progress callback hears, and the errors that a user meets."""

import pickle
from collections.abc import Callable

import pytest
import torch

from auditor import errors
from auditor.errors import (
    AuditorError,
    caused_by,
    device_failed,
    device_is_full,
    from_outside,
    let_through,
    out_of_memory,
)
from auditor.numerics.kernels import UnsupportedInFormat
from auditor.paths import nearest, nearest_above, place, within
from auditor.stages import Stages, beat, tick
from tests.support.refusing import refused


def test_every_stage_and_step_is_told_and_no_step_goes_beyond_the_total() -> None:
    heard: list[tuple[str, str, int, int]] = []
    stages = Stages(lambda *said: heard.append(said))
    with stages("measure", "two nodes", 2):
        for name in ("a", "b", "b again"):
            tick(name)
    with stages("plan", "solve"):
        tick("first")
    assert heard == [
        ("measure", "two nodes", 0, 2),
        ("measure", "a", 1, 2),
        ("measure", "b", 2, 2),
        ("measure", "b again", 2, 2),
        ("plan", "solve", 0, 0),
        ("plan", "first", 0, 0),
    ]
    assert list(stages.seconds) == ["measure", "plan"]
    assert all(seconds >= 0 for seconds in stages.seconds.values())


def test_what_torch_or_the_model_raises_in_a_stage_is_one_clear_line() -> None:
    with (
        refused(
            AuditorError, "operation-raises", match="in the stage 'measure' an operation raised RuntimeError"
        ) as raised,
        Stages(None)("measure", ""),
    ):
        torch.ones(2) @ torch.ones(3)
    assert isinstance(raised.value.__cause__, RuntimeError)


@pytest.mark.parametrize("error", [MemoryError("full"), torch.OutOfMemoryError("full")])
def test_want_of_memory_names_the_stage(error: Exception) -> None:
    with (
        refused(AuditorError, "out-of-memory", match=r"out of memory in the stage 'plan' .*full"),
        Stages(None)("plan", ""),
    ):
        raise error


@pytest.mark.parametrize(
    "error", [TimeoutError("60 s"), AuditorError("one line", slug="bad-input"), KeyboardInterrupt()]
)
def test_what_says_enough_by_itself_comes_out_as_it_is(error: BaseException) -> None:
    with pytest.raises(type(error)) as raised, Stages(None)("plan", ""):
        raise error
    assert raised.value is error
    assert not hasattr(error, "__notes__")


def test_an_error_of_our_own_stays_what_it_is_and_says_in_which_stage() -> None:
    with pytest.raises(AttributeError) as raised, Stages(None)("judge", ""):
        nearest(3, {})
    assert raised.value.__notes__ == ["in the stage 'judge'"]


def test_beats_repeat_what_is_known_and_once_a_second_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("auditor.stages.time.perf_counter", lambda: now[0])
    heard: list[tuple[float, str, int]] = []
    stages = Stages(lambda stage, detail, done, total: heard.append((now[0], detail, done)))
    with stages("measure", "two nodes", 2):
        tick("a")
        for now[0] in (0.2, 0.9, 1.0, 1.5, 2.0):
            beat()
        now[0] = 3.5
        beat("derivatives")
        now[0] = 4.6
        beat()
    assert heard == [
        (0, "two nodes", 0),
        (0, "a", 1),
        (1, "a", 1),
        (2, "a", 1),
        (3.5, "derivatives", 1),
        (4.6, "derivatives", 1),
    ]


def test_a_stage_that_raised_hears_no_more_and_without_one_nobody_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("auditor.stages.QUIET", 0.0)
    heard: list[str] = []
    beat("before")
    with pytest.raises(TimeoutError), Stages(lambda stage, detail, *_: heard.append(detail))("plan", "begins"):
        raise TimeoutError
    beat("after")
    assert heard == ["begins"]


# Errors the user meets: a slug each, the first line of what others say, and whether that is about what ran.


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
    assert not caused_by(error, TimeoutError)
    let_through(error)


def test_a_time_limit_stays_one_when_a_library_wraps_it() -> None:
    wrapped = RuntimeError("failed")
    wrapped.__cause__ = TimeoutError("60 s")
    assert caused_by(wrapped, TimeoutError)
    assert caused_by(TimeoutError(), TimeoutError)


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


# Paths of modules: what is nearest above, and what lies in what.

KNOWN = {"", "a.b", "a.b.c.d"}


@pytest.mark.parametrize(
    ("path", "own", "above"),
    [
        ("", "", None),
        ("a", "", ""),
        ("a.b", "a.b", ""),
        ("a.bc", "", ""),
        ("a.b.c", "a.b", "a.b"),
        ("a.b.c.d", "a.b.c.d", "a.b"),
        ("a.b.c.d.e", "a.b.c.d", "a.b.c.d"),
    ],
)
def test_nearest(path: str, own: str, above: str | None) -> None:
    assert (nearest(path, KNOWN), nearest_above(path, KNOWN)) == (own, above)


def test_a_prefix_of_a_name_is_no_scope() -> None:
    assert within("a.b", "a")
    assert within("a", "a")
    assert within("a", "")
    assert not within("ab", "a")


def test_a_place_is_the_line_and_the_operation_or_the_modules_that_repeat_it() -> None:
    assert place("model.py:3", "blocks.3.mlp", "aten.mul.Tensor") == "model.py:3 mul"
    assert place(None, "blocks.3.mlp", "getitem") == "blocks.*.mlp getitem"
