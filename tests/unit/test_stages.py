"""What the progress callback hears, and what is timed."""

from __future__ import annotations

import pytest
import torch

from auditor.errors import AuditorError
from auditor.paths import nearest
from auditor.stages import Stages, beat, listening


def test_every_stage_and_step_is_told_and_no_step_goes_beyond_the_total() -> None:
    heard: list[tuple[str, str, int, int]] = []
    stages = Stages(lambda *said: heard.append(said))
    with stages("measure", "two nodes", 2):
        for name in ("a", "b", "b again"):
            stages.tick(name)
    with stages("plan", "solve"):
        stages.tick("first")
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
        pytest.raises(AuditorError, match="in the stage 'measure' an operation raised RuntimeError") as raised,
        Stages(None)("measure", ""),
    ):
        torch.ones(2) @ torch.ones(3)
    assert raised.value.slug == "operation-raises"
    assert isinstance(raised.value.__cause__, RuntimeError)


@pytest.mark.parametrize("error", [MemoryError("full"), torch.OutOfMemoryError("full")])
def test_want_of_memory_names_the_stage(error: Exception) -> None:
    with (
        pytest.raises(AuditorError, match=r"out of memory in the stage 'plan' .*full") as raised,
        Stages(None)("plan", ""),
    ):
        raise error
    assert raised.value.slug == "out-of-memory"


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
        nearest(3, {})  # type: ignore[arg-type]
    assert raised.value.__notes__ == ["in the stage 'judge'"]


def test_beats_repeat_what_is_known_and_once_a_second_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("auditor.stages.time.perf_counter", lambda: now[0])
    heard: list[tuple[float, str, int]] = []
    stages = Stages(lambda stage, detail, done, total: heard.append((now[0], detail, done)))
    with stages("measure", "two nodes", 2):
        stages.tick("a")
        for now[0] in (0.2, 0.9, 1.0, 1.5, 2.0):
            stages.beat()
        now[0] = 3.5
        stages.beat("derivatives")
        now[0] = 4.6
        stages.beat()
    assert heard == [
        (0, "two nodes", 0),
        (0, "a", 1),
        (1, "a", 1),
        (2, "a", 1),
        (3.5, "derivatives", 1),
        (4.6, "derivatives", 1),
    ]


def test_the_innermost_listener_hears_them() -> None:
    outer: list[str] = []
    inner: list[str] = []
    beat("before")
    with listening(outer.append):
        beat("first")
        with listening(inner.append):
            beat("second")
        beat()
    beat("after")
    assert (outer, inner) == (["first", ""], ["second"])


def test_who_raises_listens_no_more() -> None:
    heard: list[str] = []
    with pytest.raises(ValueError, match="stop"), listening(heard.append):
        raise ValueError("stop")
    beat("after")
    assert heard == []
