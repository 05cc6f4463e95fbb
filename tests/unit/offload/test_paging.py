"""Mapped files of others are taken out of memory, with all that is in them."""

from __future__ import annotations

from pathlib import Path

import torch

from auditor.offload.limit import resident
from auditor.offload.paging import _mappings, page_out

NUMBERS = 8_000_000


def mapped(file: Path) -> torch.Tensor:
    """A private mapping, as libraries map checkpoints."""
    return torch.empty(0).set_(torch.UntypedStorage.from_file(str(file), False, 4 * NUMBERS), 0, (NUMBERS,), (1,))


def test_a_file_is_no_longer_resident_and_what_was_written_over_it_stays(tmp_path: Path) -> None:
    file = tmp_path / "weights"
    torch.arange(float(NUMBERS)).numpy().tofile(file)
    x = mapped(file)
    x[5] = -1.0
    total, before = float(x.double().sum()), resident()
    page_out(tmp_path / "elsewhere")
    assert before - resident() > 3 * NUMBERS
    assert float(x.double().sum()) == total and x[5] == -1.0
    assert torch.from_file(str(file), size=NUMBERS)[5] == 5.0


def test_libraries_and_the_arena_are_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "weights"
    torch.zeros(NUMBERS).numpy().tofile(file)
    x = mapped(file)
    assert x.data_ptr() in {start for start, _ in _mappings(tmp_path)}
    file.unlink()
    assert x.data_ptr() in {start for start, _ in _mappings(tmp_path / "elsewhere")}
    assert x.data_ptr() not in {start for start, _ in _mappings(tmp_path)}
    named = [line for line in Path("/proc/self/maps").read_text().splitlines() if "libtorch_cpu" in line]
    starts = {int(line.split("-")[0], 16) for line in named}
    assert starts and not starts & {start for start, _ in _mappings(tmp_path)}
