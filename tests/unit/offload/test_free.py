"""Whether a model fits into what is free, of the machine or of the group of processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from auditor.offload import free as room
from auditor.offload.free import EACH, HELD, fitting, free


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with 8 GB available, in no group."""
    (tmp_path / "meminfo").write_text("MemTotal: 16000000 kB\nMemAvailable:    8000000 kB\n", encoding="utf-8")
    monkeypatch.setattr(room, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(room, "_CGROUPS", tmp_path)
    return tmp_path


def test_a_model_that_fits_has_no_limit_and_a_larger_one_has(machine: Path) -> None:
    assert free() == 8_192_000_000
    assert fitting(int(8_192_000_000 / HELD)) is None
    assert fitting(int(8_192_000_000 / HELD) + 1) == int(EACH * 8_192_000_000)


def test_a_group_may_have_less(machine: Path) -> None:
    (machine / "memory.max").write_text("2000000000\n", encoding="utf-8")
    (machine / "memory.current").write_text("500000000\n", encoding="utf-8")
    assert free() == 1_500_000_000
    (machine / "memory.max").write_text("max\n", encoding="utf-8")
    assert free() == 8_192_000_000


def test_a_system_that_does_not_say_limits_nothing(machine: Path) -> None:
    (machine / "meminfo").unlink()
    assert free() is None and fitting(10**15) is None
