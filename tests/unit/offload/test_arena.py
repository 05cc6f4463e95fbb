"""Memory in files without names: what is put there stays, whatever is let go of; what nobody holds is used again."""

from __future__ import annotations

import errno
import gc
import itertools
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from auditor.errors import AuditorError
from auditor.offload import arena as arenas
from auditor.offload.arena import FIRST, Arena, roomy
from auditor.offload.limit import resident


def tensor(arena: Arena, numbers: int, value: float) -> torch.Tensor:
    x = torch.empty(0).set_(arena.storage(4 * numbers), 0, (numbers,), (1,))
    return x.fill_(value)


def test_entries_outlive_what_is_let_go_of_and_memory_is_given_back(tmp_path: Path) -> None:
    arena = Arena(tmp_path)
    x, y = tensor(arena, 10_000_000, 1.5), tensor(arena, 1000, 2.5)
    full = resident()
    arena.let_go()
    assert full - resident() > 35_000_000
    assert bool((x == 1.5).all()) and bool((y == 2.5).all())
    assert list(tmp_path.iterdir()) == []


def test_storages_are_as_large_as_asked_for_and_lie_apart(tmp_path: Path) -> None:
    arena = Arena(tmp_path)
    found = [arena.storage(size) for size in (1, 4096, 4097, FIRST, 3 * FIRST)]
    assert [s.nbytes() for s in found] == [1, 4096, 4097, FIRST, 3 * FIRST]
    places = sorted((s.data_ptr(), s.nbytes()) for s in found)
    assert all(a + n <= b for (a, n), (b, _) in itertools.pairwise(places))
    assert all(s.data_ptr() % 64 == 0 for s in found)


def test_what_nobody_holds_is_used_again_and_what_a_view_holds_is_not(tmp_path: Path) -> None:
    arena = Arena(tmp_path)
    x = tensor(arena, 1_000_000, 1.0)
    place, view = x.data_ptr(), x[5:9]
    del x
    gc.collect()
    other = tensor(arena, 1_000_000, 2.0)
    assert other.data_ptr() != place and view.tolist() == [1.0] * 4
    del view
    assert tensor(arena, 1_000_000, 3.0).data_ptr() == place


def test_many_sizes_come_and_go_in_one_file(tmp_path: Path) -> None:
    arena, held = Arena(tmp_path), dict[int, torch.Tensor]()
    generator = torch.Generator().manual_seed(0)
    for step in range(400):
        size, key = (int(torch.randint(1, high, (), generator=generator)) for high in (60_000, 12))
        held[key] = tensor(arena, size, float(step))
        assert all(bool((x == x[0]).all()) for x in held.values())
    assert arena.size == FIRST
    held.clear()
    arena.storage(FIRST)
    assert arena.size == FIRST


def test_tensors_hold_their_memory_when_the_arena_is_gone(tmp_path: Path) -> None:
    x = tensor(Arena(tmp_path), 1000, 7.0)
    gc.collect()
    assert bool((x == 7.0).all())


def test_a_full_disk_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arena = Arena(tmp_path)
    kept = tensor(arena, 1000, 1.0)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(AuditorError, match=r"no room for 95.4 MiB more in .*\(16 MiB are there already; No space") as e:
        arena.storage(100_000_000)
    assert e.value.slug == "disk-full" and "\n" not in str(e.value)
    assert list(tmp_path.iterdir()) == [] and bool((kept == 1.0).all())


def test_files_may_not_grow_beyond_what_the_process_may_write(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    arena = Arena(tmp_path)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        assert arena.storage(1 << 19).nbytes() == 1 << 19  # less than a first file, but all that there is room for
        with pytest.raises(AuditorError, match="no room") as error:
            arena.storage(1 << 21)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert error.value.slug == "disk-full"


def test_nothing_is_left_of_a_process_that_is_killed(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; from pathlib import Path; from auditor.offload import Arena\n"
        "s = Arena(Path(sys.argv[1])).storage(1 << 20); s.fill_(1); os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    assert done.returncode == -9 and list(tmp_path.iterdir()) == []


def test_where_files_without_names_cannot_be_made_they_lose_theirs_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "O_TMPFILE")
    arena = Arena(tmp_path)
    assert bool((tensor(arena, 1000, 1.0) == 1.0).all()) and list(tmp_path.iterdir()) == []


def test_a_folder_that_is_memory_is_taken_where_somebody_chose_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arenas, "_in_memory", lambda folder: folder == tmp_path)
    monkeypatch.setattr(arenas.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    assert roomy() == tmp_path
    for name in ("TMPDIR", "TEMP", "TMP"):
        monkeypatch.delenv(name, raising=False)
    assert roomy() == Path("/var/tmp")
