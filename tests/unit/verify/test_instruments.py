"""Clocks and counters of memory see what runs in their bodies, and nothing else."""

from __future__ import annotations

import time
from typing import Any, ClassVar

import pytest
import torch

from auditor.verify import instruments


def test_the_clock_runs_in_the_body_alone() -> None:
    with instruments.clock("cpu") as elapsed:
        time.sleep(0.02)
    time.sleep(0.05)
    assert 0.02 <= elapsed() < 0.06


def test_memory_is_the_most_at_one_time(capfd: pytest.CaptureFixture[str]) -> None:
    with instruments.memory("cpu") as most:
        first = torch.empty(1 << 20)
        del first
        second = torch.empty(1 << 18)
        third = torch.empty(1 << 18)
    assert 4 << 20 <= most() < 5 << 20
    del second, third
    assert capfd.readouterr().err == ""
    with instruments.memory("cpu") as most:
        pass
    assert most() == 0


class Events:
    """A GPU's module, as far as times are taken with it."""

    log: ClassVar[list[str]] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            Events.log.append("record")

        def synchronize(self) -> None:
            Events.log.append("wait")

        def elapsed_time(self, end: Any) -> float:
            return 1500.0

    @staticmethod
    def synchronize(device: str) -> None:
        Events.log.append("all done")


def test_a_gpu_times_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_device_module", lambda kind: Events)
    with instruments.clock("cuda:0") as elapsed:
        Events.log.append("body")
    assert elapsed() == 1.5
    assert Events.log == ["all done", "record", "body", "record", "wait"]
