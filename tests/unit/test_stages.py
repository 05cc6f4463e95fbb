"""What the progress callback hears, and what is timed."""

from __future__ import annotations

from auditor.stages import Stages


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


def test_a_stage_that_is_not_wanted_is_neither_told_nor_timed() -> None:
    heard: list[object] = []
    stages = Stages(lambda *said: heard.append(said))
    with stages("training", "the FP32 step", wanted=False):
        pass
    assert heard == []
    assert stages.seconds == {}


def test_the_steps_of_a_stage_are_counted_from_its_start() -> None:
    heard: list[tuple[int, int]] = []
    stages = Stages(lambda stage, detail, done, total: heard.append((done, total)))
    for _ in range(2):
        with stages("measure", "three nodes", 3):
            stages.tick("a")
    assert heard == [(0, 3), (1, 3)] * 2
