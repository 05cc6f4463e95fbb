"""What is resident stays below a limit as far as it can be let go of."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from auditor.errors import AuditorError
from auditor.offload import Arena, Limit, limit, limited
from auditor.offload.limit import LARGE, ROOM, SMALL, now, resident, too_small, words
from auditor.settings import Settings


def test_what_operations_make_is_let_go_of_and_comes_back() -> None:
    base = resident()
    with limited(base + ROOM + (60 << 20)) as held:
        assert held is not None and now() is held
        kept = [torch.full((2_500_000,), float(i)) for i in range(40)]  # 400 MB
        assert all(bool((x == i).all()) for i, x in enumerate(kept))
        assert held.arena.dropped >= 2 and held.arena.written >= 4 * 10**8
        assert held.peak < held.size
        assert all(bool((x == i).all()) for i, x in enumerate(kept))
    assert now() is None
    assert held.peak < held.size


def test_without_a_limit_nothing_is_done() -> None:
    with limited(None) as held:
        assert held is None and now() is None


def test_too_small_a_limit_says_what_is_enough() -> None:
    with pytest.raises(
        AuditorError, match=r"--memory 10MB is too little for this audit: give [\d.]+[MG]B or more"
    ) as error:
        Limit(10_000_000)
    least = int(Settings(memory=str(error.value).split()[-3]).memory)
    assert error.value.slug == "memory-too-small"
    Limit(least + (8 << 20))
    assert "give 2.1GB or more" in str(too_small(10**9, 2_000_000_001))


def test_how_large_a_large_tensor_is_depends_on_the_limit(tmp_path: Path) -> None:
    held = Limit(resident() + 2 * ROOM, Arena(tmp_path))
    for size, large in ((10**8, SMALL), (2 << 30, 1 << 19), (10**11, LARGE)):
        held.size = size
        assert held.large == large


def test_a_system_that_says_nothing_of_memory_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(limit, "_STATM", tmp_path / "none")
    with pytest.raises(AuditorError, match="leave --memory out") as error, limited(10**9):
        raise AssertionError
    assert error.value.slug == "no-paging"


@pytest.mark.parametrize("size", [1, 123_456_789, 999_999_999, 10**9, 1_234_567_890, 7 * 10**10])
def test_a_size_in_words_is_enough_when_given_again(size: int) -> None:
    assert size <= Settings(memory=words(size)).memory <= max(1.1 * size, 10**7)
