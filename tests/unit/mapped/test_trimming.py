"""What lies free between what is held goes back when asked, and once the process has grown."""

from __future__ import annotations

import pytest
import torch

from auditor.mapped import trimming
from auditor.mapped.limit import resident
from auditor.mapped.trimming import GROWN, Trimming, give_back


def test_what_lies_free_between_what_is_held_goes_back_when_asked() -> None:
    pieces = [torch.ones(20_000) for _ in range(1000)]  # 80 kB each: too small to come from the system by themselves
    held, full = pieces[::100], resident()
    del pieces
    give_back()
    assert full - resident() > 50_000_000
    assert all(float(x.sum()) == 20_000 for x in held)


def test_memory_goes_back_once_the_process_has_grown(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, given = iter([1000, 1000 * (1 + GROWN) - 1, 1000 * (1 + GROWN) + 1, 1050, 1100]), list[str]()
    monkeypatch.setattr(trimming, "resident", lambda: next(sizes))
    monkeypatch.setattr(trimming, "give_back", lambda: given.append("now"))
    trim = Trimming()
    trim()
    assert given == []
    trim()  # and is as large as 1050 afterwards
    assert given == ["now"]
    trim()
    assert given == ["now"]
